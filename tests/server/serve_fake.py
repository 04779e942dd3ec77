"""A server process around a fake engine: `serve_fake.py PORT SHUTDOWN_TIMEOUT`.

Prints its URL when it accepts connections, and at the end how many requests were aborted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

from rawpaged.server.app import create_app
from rawpaged.server.metrics import PrometheusStats
from rawpaged.server.run import run_server
from tests.server.fake_engine import FakeEngine

engine = FakeEngine(delay=0.05)
app = create_app(cast(Any, engine), served_model_names=["fake"], stats=PrometheusStats("fake"))
run_server(
    app,
    host="127.0.0.1",
    port=int(sys.argv[1]),
    on_ready=lambda url: print(url, flush=True),
    shutdown_timeout=float(sys.argv[2]),
)
print(f"{len(engine.aborted)} aborted, {len(engine.finished)} finished", flush=True)
