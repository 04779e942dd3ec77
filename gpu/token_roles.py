"""Attention's batch cut by what its tokens are, for bits that do not depend on the batch.

The kernels of decode and prefill add in different orders. Which of them takes a token must then not
depend on how many tokens of its request are in the step: that follows from the token budget, from
what is in the prefix cache, and from preemption. So tokens of a prompt go to prefill, be it one
alone, and tokens that were generated to decode, be it many when they are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rawpaged.backend import BatchMeta


@dataclass(frozen=True, slots=True)
class RoleBatch:
    """The batch as attention takes it: the prompt's part of a request, and each other token, as if
    they were requests of their own."""

    query_start_loc: npt.NDArray[np.int32]  # i32[num_parts + 1]
    seq_lens: npt.NDArray[np.int32]  # i32[num_parts], keys of a part, its queries' included
    block_tables: npt.NDArray[np.int32]  # i32[num_parts, max_blocks]
    is_prompt: npt.NDArray[np.bool_]  # bool[num_parts]


def split_roles(meta: BatchMeta) -> RoleBatch:
    """Parts in the order of their tokens; `meta.num_prompt_tokens` has to be given."""
    assert meta.num_prompt_tokens is not None
    queries = np.diff(meta.query_start_loc)
    starts = meta.seq_lens - queries
    of_prompt = np.clip(meta.num_prompt_tokens - starts, 0, queries)
    generated = queries - of_prompt
    # A part for a prompt's tokens, if there are any, then one for each generated token.
    parts = generated + (of_prompt > 0)
    owner = np.repeat(np.arange(len(queries)), parts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    is_prompt = (index == 0) & (of_prompt[owner] > 0)
    lengths = np.where(is_prompt, of_prompt[owner], 1)
    # Of a request's tokens up to the part's last one, those before the step included.
    ends = starts[owner] + of_prompt[owner] + index + (of_prompt[owner] == 0)
    return RoleBatch(
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=np.ascontiguousarray(meta.block_tables[owner]),
        is_prompt=is_prompt,
    )
