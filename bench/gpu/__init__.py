"""Checks and timings on a GPU; `bench.gpu_suite` runs them."""
