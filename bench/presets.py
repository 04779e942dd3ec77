"""Cases for `serve`: how many requests of what shape, and how they arrive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCase:
    """Requests that a server gets; raises ValueError where they cannot be made."""

    name: str
    num_requests: int
    concurrency: int | None
    """Requests under way at once, a new one as soon as one ends; None with `request_rate`."""
    prompt_len: int
    """Tokens of each prompt, shared prefix included."""
    output_len: int
    shared_prefix_len: int = 0
    """First tokens that all prompts of one repetition have in common."""
    request_rate: float | None = None
    """Requests a second, with exponential gaps (a Poisson process)."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate is None):
            raise ValueError("a case has either a concurrency or a request rate")
        for name in ("num_requests", "concurrency", "prompt_len", "output_len", "request_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0")
        if not 0 <= self.shared_prefix_len <= self.prompt_len:
            raise ValueError(
                f"shared_prefix_len={self.shared_prefix_len} must be between 0 and "
                f"prompt_len={self.prompt_len}"
            )


PRESETS: dict[str, ServeCase] = {
    case.name: case
    for case in (
        ServeCase(name="a", num_requests=4, concurrency=1, prompt_len=128, output_len=128),
        ServeCase(name="b", num_requests=32, concurrency=8, prompt_len=128, output_len=128),
        ServeCase(name="c", num_requests=96, concurrency=32, prompt_len=128, output_len=128),
        ServeCase(name="d", num_requests=6, concurrency=1, prompt_len=1024, output_len=1),
        ServeCase(
            name="e",
            num_requests=16,
            concurrency=4,
            prompt_len=800,
            output_len=32,
            shared_prefix_len=768,
        ),
    )
}
"""One stream, 8 streams, 32 streams, prefill alone, and a shared prefix."""
