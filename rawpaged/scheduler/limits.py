"""What could never run to its end, and is refused when it arrives."""

from __future__ import annotations

from rawpaged.config import SchedulerConfig
from rawpaged.errors import InvalidRequestError
from rawpaged.request import Request, RequestGroup


def check_limits(group: RequestGroup, config: SchedulerConfig) -> None:
    """Raises InvalidRequestError for requests that would not fit even alone.

    How many there are does not matter: each fits by itself, so they run in turns. Only those in
    lockstep have to fit together.
    """
    for request in group.requests:
        _check_request(request, config)
    if group.lockstep:
        _check_lockstep(group, config)


def _check_request(request: Request, config: SchedulerConfig) -> None:
    if request.num_prompt_tokens == 0:
        raise InvalidRequestError("prompt holds no tokens", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens={request.max_tokens} must be at least 1", "max_tokens"
        )
    if request.num_prompt_tokens + request.max_tokens > config.max_model_len:
        raise InvalidRequestError(
            f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} "
            f"are more than max_model_len={config.max_model_len}",
            "max_tokens",
        )


def _check_lockstep(group: RequestGroup, config: SchedulerConfig) -> None:
    width = len(group.requests)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(config, name)
        if width > limit:
            raise InvalidRequestError(f"n={width} beams are more than {name}={limit}", "n")
    # The full blocks of the prompt are held once; all else may differ from beam to beam.
    first = group.requests[0]
    num_shared = first.num_prompt_tokens // config.block_size
    num_blocks = -(-(first.num_prompt_tokens + first.max_tokens) // config.block_size)
    needed = num_shared + width * (num_blocks - num_shared)
    if needed > config.num_blocks:
        raise InvalidRequestError(
            f"n={width} beams of {first.num_prompt_tokens} prompt tokens and "
            f"max_tokens={first.max_tokens} may need {needed} KV blocks of {config.block_size} "
            f"tokens, and the pool has {config.num_blocks}; lower n or max_tokens",
            "n",
        )
