from __future__ import annotations

from typing import Any

import pytest

from rawpaged.server.app import create_app
from rawpaged.server.context import CONTEXT
from rawpaged.server.errors import HttpError
from rawpaged.server.metrics import PrometheusStats
from tests.server.fake_engine import FakeEngine


@pytest.mark.parametrize("options", [{}, {"enable_admin_routes": False}])
def test_admin_routes_are_off_unless_asked_for(options: Any) -> None:
    app = create_app(
        FakeEngine(),  # type: ignore[arg-type]
        served_model_names=["fake"],
        stats=PrometheusStats("fake"),
        **options,
    )
    with pytest.raises(HttpError, match="--enable-admin-routes") as info:
        app[CONTEXT].require_admin()
    assert info.value.status == 404


def test_admin_routes_on() -> None:
    app = create_app(
        FakeEngine(),  # type: ignore[arg-type]
        served_model_names=["fake"],
        stats=PrometheusStats("fake"),
        enable_admin_routes=True,
    )
    app[CONTEXT].require_admin()
