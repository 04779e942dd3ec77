"""What completions and chat share on the way from a parsed body to the engine's outputs."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

from rawpaged.errors import InvalidRequestError
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import SamplingParams
from rawpaged.server.admission import merge
from rawpaged.server.context import ServerContext
from rawpaged.server.labels import REQUEST_ID_PATTERN, current_labels
from rawpaged.server.protocol import GenerationRequest

MAX_USER_LENGTH = 512


def name_request(prefix: str, body: GenerationRequest) -> str:
    """The response's id; takes over `request_id` and `user` of the body for header and log.

    Raises InvalidRequestError for labels that no log line should hold.
    """
    labels = current_labels.get()
    if body.request_id is not None:
        if not REQUEST_ID_PATTERN.fullmatch(body.request_id):
            raise InvalidRequestError(
                "request_id must be 1 to 128 letters, digits and characters of `._:-`",
                "request_id",
            )
        labels.request_id = body.request_id
    if body.user is not None:
        if len(body.user) > MAX_USER_LENGTH:
            raise InvalidRequestError(
                f"user has {len(body.user)} characters, the limit is {MAX_USER_LENGTH}", "user"
            )
        labels.user = body.user
    return f"{prefix}-{labels.request_id}"


def validate_all(
    context: ServerContext, prompts: Sequence[list[int]], params: SamplingParams
) -> None:
    """Raises InvalidRequestError for what the engine would refuse, before anything runs."""
    for token_ids in prompts:
        context.engine.validate(token_ids, params)


def generate_all(
    context: ServerContext, prompts: Sequence[list[int]], params: SamplingParams, request_id: str
) -> AsyncGenerator[tuple[int, list[RequestOutput]], None]:
    """Outputs of every prompt as they come, each with its prompt's index; all are queued now.

    Raises QueueFullError if not all of them may wait.

    The engine's ids get a random part: a client may send the same id twice at a time, and neither
    may end the other.
    """
    context.admission.check_queue(len(prompts))
    unique_id = f"{request_id}-{secrets.token_hex(6)}"
    return merge(
        [
            context.admission.generate(token_ids, params, f"{unique_id}-{index}")
            for index, token_ids in enumerate(prompts)
        ]
    )
