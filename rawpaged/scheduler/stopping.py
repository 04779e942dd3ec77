"""When a request has sampled its last token."""

from __future__ import annotations

from rawpaged.request import FinishReason, Request


def check_stop(request: Request) -> bool:
    """Sets the reason and returns True if the request's last token is its last for good."""
    params = request.sampling_params
    token_id = request.token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if token_id in request.eos_token_ids and not params.ignore_eos:
            request.finish_reason = FinishReason.STOP
            return True
        if token_id in (params.stop_token_ids or ()):
            request.finish_reason = FinishReason.STOP
            request.stop_reason = token_id
            return True
    if request.num_output_tokens >= request.max_tokens:
        request.finish_reason = FinishReason.LENGTH
        return True
    return False
