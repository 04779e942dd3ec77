"""Random prompts that share their prefix and nothing else.

Servers keep prompts in a prefix cache, so a prompt that was sent before would measure the cache:
each repetition and the warm-up draw from generators of their own.
"""

from __future__ import annotations

import numpy as np

from bench.presets import ServeCase

Prompt = list[int] | str

# Common English words that most vocabularies hold as one token with the blank before them.
_TEXT = """
the of and to in that was his he it with is for as had you not be her on at by which have or from
this him but all she they were my are me one their so an said them we who would been will no when
there if more out up into do any your what has man could other than our some very time upon about
may its only now like little then can made should did us such great before must two these see know
over much down after first good men old new long day life hand work place water house world people
"""
_WORDS = _TEXT.split()


def make_prompts(
    case: ServeCase,
    rng: np.random.Generator,
    *,
    prompt_format: str,
    token_ids: tuple[int, int],
    count: int | None = None,
) -> list[Prompt]:
    """`count` prompts of the case (all of its requests unless given) as "ids" or "text".

    Ids are drawn from [token_ids[0], token_ids[1]). A text has one word for each token that is
    asked for; how many tokens a server makes of it is in the usage that it reports.
    """
    count = case.num_requests if count is None else count
    shape = (count, case.prompt_len)
    if prompt_format == "ids":
        ids = rng.integers(*token_ids, shape)
        ids[:, : case.shared_prefix_len] = rng.integers(*token_ids, case.shared_prefix_len)
        prompts: list[Prompt] = ids.tolist()
        return prompts
    picks = rng.integers(0, len(_WORDS), shape)
    picks[:, : case.shared_prefix_len] = rng.integers(0, len(_WORDS), case.shared_prefix_len)
    return [" ".join(_WORDS[pick] for pick in row) for row in picks]


def arrival_times(case: ServeCase, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which each request is sent; all 0 in a closed loop."""
    if case.request_rate is None:
        return [0.0] * case.num_requests
    gaps = rng.exponential(1 / case.request_rate, case.num_requests)
    gaps[0] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times
