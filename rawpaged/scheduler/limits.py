"""What could never run to its end, and is refused when it arrives."""

from __future__ import annotations

from rawpaged.config import SchedulerConfig
from rawpaged.errors import InvalidRequestError, count_of
from rawpaged.request import Request, RequestGroup


def check_limits(group: RequestGroup, config: SchedulerConfig) -> None:
    """Raises InvalidRequestError for requests that would not fit even alone.

    How many there are does not matter: each fits by itself, so they run in turns. Only those in
    lockstep have to fit together.
    """
    check_priority(group.priority, config)
    for request in group.requests:
        _check_request(request, config)
    if group.lockstep:
        first = group.requests[0]
        check_lockstep(len(group.requests), first.num_prompt_tokens, first.max_tokens, config)


def check_priority(priority: int, config: SchedulerConfig) -> None:
    """Raises InvalidRequestError for a priority that nobody would look at."""
    if priority != 0 and config.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority={priority} needs the scheduling policy 'priority', and this is "
            f"{config.scheduling_policy!r}; start with --scheduling-policy priority",
            "priority",
        )


def _check_request(request: Request, config: SchedulerConfig) -> None:
    if request.num_prompt_tokens == 0:
        raise InvalidRequestError("prompt holds no tokens", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens={request.max_tokens} must be at least 1", "max_tokens"
        )
    if request.num_prompt_tokens + request.max_tokens > config.max_model_len:
        raise InvalidRequestError(
            f"{count_of(request.num_prompt_tokens, 'prompt token')} and "
            f"max_tokens={request.max_tokens} are more than max_model_len={config.max_model_len}",
            "max_tokens",
        )


def check_lockstep(
    width: int, num_prompt_tokens: int, max_tokens: int, config: SchedulerConfig
) -> None:
    """Raises InvalidRequestError for beams of one prompt that could not run together."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(config, name)
        if width > limit:
            raise InvalidRequestError(f"n={width} beams are more than {name}={limit}", "n")
    # The full blocks of the prompt are held once; all else may differ from beam to beam.
    num_shared = num_prompt_tokens // config.block_size
    num_blocks = -(-(num_prompt_tokens + max_tokens) // config.block_size)
    needed = num_shared + width * (num_blocks - num_shared)
    if needed > config.num_blocks:
        raise InvalidRequestError(
            f"n={width} beams of {count_of(num_prompt_tokens, 'prompt token')} and "
            f"max_tokens={max_tokens} may need {needed} KV blocks of {config.block_size} tokens, "
            f"and the pool has {config.num_blocks}; lower n or max_tokens",
            "n",
        )
