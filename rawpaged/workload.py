"""Made-up requests of given sizes, described in a few words on a command line."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rawpaged.errors import ConfigError

MAX_PROMPTS = 100_000
_FORM = "prompts=32,prompt_len=128,output_len=64-128"
_NUMBERS = ("prompts", "shared_prefix_len", "seed")
_RANGES = ("prompt_len", "output_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all come at once; lengths are drawn evenly from [first, last].

    Raises ConfigError for sizes that cannot be.
    """

    prompts: int = 8
    prompt_len: tuple[int, int] = (128, 128)
    output_len: tuple[int, int] = (32, 32)
    shared_prefix_len: int = 0
    """First tokens that all prompts have in common."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.prompts <= MAX_PROMPTS:
            raise ConfigError(f"prompts={self.prompts} must be between 1 and {MAX_PROMPTS}")
        for name, (first, last) in (
            ("prompt_len", self.prompt_len),
            ("output_len", self.output_len),
        ):
            if not 1 <= first <= last:
                raise ConfigError(f"{name}={first}-{last} must rise from 1 or more")
        if self.shared_prefix_len > self.prompt_len[0]:
            raise ConfigError(
                f"shared_prefix_len={self.shared_prefix_len} is more than the shortest prompt, "
                f"prompt_len={self.prompt_len[0]}"
            )

    def requests(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """(prompt token ids, number of output tokens) of each request, the same in every run."""
        rng = random.Random(self.seed)
        prefix = [rng.randrange(vocab_size) for _ in range(self.shared_prefix_len)]
        made = []
        for _ in range(self.prompts):
            length = rng.randint(*self.prompt_len)
            rest = [rng.randrange(vocab_size) for _ in range(length - len(prefix))]
            made.append((prefix + rest, rng.randint(*self.output_len)))
        return made


def parse_workload(text: str) -> Workload:
    """Such as `prompts=32,prompt_len=128,output_len=64-128`; raises ConfigError."""
    values: dict[str, tuple[int, int]] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _NUMBERS + _RANGES:
            known = ", ".join(_NUMBERS + _RANGES)
            raise ConfigError(f"{name!r} is not one of {known}; say {_FORM}")
        if name in values:
            raise ConfigError(f"{name} is given twice")
        values[name] = parse_range(value)
        if name in _NUMBERS and values[name][0] != values[name][1]:
            raise ConfigError(f"{name}={value} must be one number")
    default = Workload()
    return Workload(
        prompts=values.get("prompts", (default.prompts,))[0],
        prompt_len=values.get("prompt_len", default.prompt_len),
        output_len=values.get("output_len", default.output_len),
        shared_prefix_len=values.get("shared_prefix_len", (default.shared_prefix_len,))[0],
        seed=values.get("seed", (default.seed,))[0],
    )


def parse_range(text: str) -> tuple[int, int]:
    """(800, 810) of "800-810", (800, 800) of "800"; raises ConfigError."""
    first, dash, last = text.strip().partition("-")
    if not (_is_number(first) and (_is_number(last) if dash else True)):
        raise ConfigError(f"{text!r} is no number and no range such as 800-810")
    numbers = int(first), int(last if dash else first)
    if numbers[0] > numbers[1]:
        raise ConfigError(f"{text!r} ends before it begins")
    return numbers


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9
