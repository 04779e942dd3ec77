"""Measurements of rawpaged and of other servers: `python -m bench.run --help`."""
