"""Launch sizes of kernels that step by the launch's size."""

from __future__ import annotations

_MOST_BLOCKS_Y = 65535
_MOST_BLOCKS_X = 2**31 - 1
_THREADS = 256


def elements(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(grid, block) for `count` > 0 independent elements, a thread each."""
    return (min(-(-count // _THREADS), _MOST_BLOCKS_X),), (_THREADS,)


def rows(num_rows: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(grid, block) for rows over blockIdx.x, the elements of one over threads and blockIdx.y."""
    threads = min(-(-size // 32) * 32, _THREADS)
    return (min(num_rows, _MOST_BLOCKS_X), min(-(-size // threads), _MOST_BLOCKS_Y)), (threads,)


def heads(num_tokens: int, num_heads: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(grid, block) for tokens over blockIdx.x and heads over y; threadIdx.x within a head."""
    threads = min(-(-size // 32) * 32, _THREADS)
    heads_a_block = min(_THREADS // threads, num_heads)
    grid = (min(num_tokens, _MOST_BLOCKS_X), -(-num_heads // heads_a_block))
    return grid, (threads, heads_a_block)
