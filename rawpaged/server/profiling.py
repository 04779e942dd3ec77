"""POST /start_profile and /stop_profile: traces of the running engine, for whoever may ask."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec
from aiohttp import web

from rawpaged.errors import ConfigError, InvalidRequestError
from rawpaged.server.body import json_response, read_body
from rawpaged.server.context import CONTEXT
from rawpaged.server.errors import HttpError
from rawpaged.server.protocol import parse_body


class StartProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    num_steps: int | None = None
    record_ops: bool = False
    """Also write what the ops were called with, without token ids."""


class StopProfileRequest(msgspec.Struct, forbid_unknown_fields=True):
    pass


class ProfileStarted(msgspec.Struct, kw_only=True):
    file: str
    """Name of the trace inside the server's --profiler-dir, once the profile has ended."""
    ops_file: str | None
    """Name of the recording of ops, likewise; None if none was asked for."""
    first_step: int
    num_steps: int | None


class ProfileStopped(msgspec.Struct, kw_only=True):
    file: str | None
    """None if no step has run since the start."""
    ops_file: str | None
    first_step: int
    num_steps: int
    num_ranges: int
    is_truncated: bool


async def start_profile(request: web.Request) -> web.Response:
    """Trace from the next step on, for `num_steps` or until /stop_profile."""
    directory = _profiler_dir(request)
    body = await read_body(request)
    wanted = parse_body(body, StartProfileRequest) if body else StartProfileRequest()
    if wanted.num_steps is not None and wanted.num_steps < 1:
        message = f"num_steps must be at least 1, not {wanted.num_steps}"
        raise InvalidRequestError(message, "num_steps")
    # No part of the name comes from a client.
    tag = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
    name, ops_name = f"profile-{tag}.json", f"ops-{tag}.json" if wanted.record_ops else None
    first_step = await request.app[CONTEXT].engine.start_profile(
        directory / name,
        record_path=directory / ops_name if ops_name else None,
        num_steps=wanted.num_steps,
    )
    return json_response(
        ProfileStarted(
            file=name, ops_file=ops_name, first_step=first_step, num_steps=wanted.num_steps
        )
    )


async def stop_profile(request: web.Request) -> web.Response:
    """End the profile, or tell of the one that has ended by itself; its file is written."""
    _profiler_dir(request)
    if body := await read_body(request):
        parse_body(body, StopProfileRequest)
    profile = await request.app[CONTEXT].engine.stop_profile()
    return json_response(
        ProfileStopped(
            file=None if profile.path is None else profile.path.name,
            ops_file=None if profile.record_path is None else profile.record_path.name,
            first_step=profile.first_step,
            num_steps=profile.num_steps,
            num_ranges=len(profile.ranges),
            is_truncated=profile.is_truncated,
        )
    )


def prepare_profiler_dir(path: str) -> Path:
    """The directory for traces, made if it is not there; raises ConfigError if it cannot be."""
    directory = Path(path).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".{secrets.token_hex(8)}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"profiler_dir={path!r} cannot be used: {error.strerror}") from error
    return directory


def _profiler_dir(request: web.Request) -> Path:
    """Where traces go. Raises HttpError: 404 when profiling is off, 400 for a query."""
    directory = request.app[CONTEXT].profiler_dir
    if directory is None:
        raise HttpError(404, "profiling is off: start the server with --profiler-dir DIR")
    if request.query_string:
        raise HttpError(400, 'no query is taken: send fields as JSON, such as {"num_steps": 10}')
    return directory
