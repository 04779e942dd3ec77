"""Sampling on the GPU: launches gpu/kernels/sample.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rawpaged.errors import BackendError
from rawpaged.gpu.arrays import ArrayInfo, array_info, check
from rawpaged.gpu.module import (
    Instance,
    KernelDeclaration,
    Loader,
    instantiate,
    load_kernels,
)

MAX_VOCAB_SIZE = 1 << 20
"""So that sums of fixed-point weights stay within 64 bits."""
MAX_TOP_LOGPROBS = 1024
"""Tokens that a row's log-probabilities may list, held in shared memory."""

_SAMPLE = KernelDeclaration(
    "sample.cu",
    "sample",
    "int* out, const float* logits, const float* temperature, const int* top_k, "
    "const float* top_p, const float* min_p, const unsigned long long* seeds, "
    "const unsigned* positions, const unsigned* sample_indices, int vocab, long long stride",
)
_TOKEN_LOGPROBS = KernelDeclaration(
    "sample.cu",
    "token_logprobs",
    "float* chosen, int* ranks, int* top_ids, float* top_logprobs, const float* logits, "
    "const int* token_ids, int vocab, int k, long long stride",
)
_ROW_DTYPES = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seeds": "uint64",
    "positions": "uint32",
    "sample_indices": "uint32",
}


@dataclass(frozen=True, slots=True)
class DeviceSamplingRows:
    """rawpaged.backend.SamplingRows on the device: one element a row of logits."""

    temperature: Any  # f32[num_rows], 0: greedy
    top_k: Any  # i32[num_rows], 0: all
    top_p: Any  # f32[num_rows]
    min_p: Any  # f32[num_rows]
    seeds: Any  # u64[num_rows]
    positions: Any  # u32[num_rows]
    sample_indices: Any  # u32[num_rows]


@dataclass(frozen=True, slots=True)
class DeviceLogprobRows:
    """rawpaged.backend.TokenLogprobRows on the device."""

    chosen: Any  # f32[num_rows]
    ranks: Any  # i32[num_rows]
    top_token_ids: Any  # i32[num_rows, k]
    top_logprobs: Any  # f32[num_rows, k]


def threads_of_row(vocab_size: int) -> int:
    """Threads of a row's block: eight logits each, from one warp up to 1024 threads."""
    threads = 32
    while threads < 1024 and 8 * threads < vocab_size:
        threads *= 2
    return threads


def instances(threads: int) -> tuple[Instance, Instance]:
    """The kernels with `threads` a block: sample, token_logprobs."""
    sample, logprobs = (
        instantiate(
            declaration, f"{declaration.function}_f32_t{threads}", (threads,), threads=threads
        )
        for declaration in (_SAMPLE, _TOKEN_LOGPROBS)
    )
    return sample, logprobs


class Sampling:
    """Draws and log-probabilities over logits f32[num_rows, vocab_size].

    The ids and log-probabilities are those of the CPU backend, but for what rounding does to a
    draw that falls on the edge between two tokens, or to a mass that just reaches top_p.
    """

    def __init__(self, loader: Loader, *, vocab_size: int) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise BackendError(
                f"vocab_size={vocab_size} is more than the GPU sampler's {MAX_VOCAB_SIZE}"
            )
        self.vocab_size = vocab_size
        self._threads = threads_of_row(vocab_size)
        kernels = instances(self._threads)
        loaded = load_kernels(loader, kernels)
        self._sample, self._token_logprobs = (loaded[kernel.name] for kernel in kernels)

    def sample(self, out: Any, logits: Any, rows: DeviceSamplingRows) -> None:
        """out i32[num_rows] = one token id a row, -1 where no logit is above -inf."""
        info = self._logits_info(logits)
        num_rows = info.shape[0]
        check(_is_vector(out, num_rows, "int32"), out=out, logits=logits)
        arrays = {name: getattr(rows, name) for name in _ROW_DTYPES}
        check(
            all(_is_vector(arrays[name], num_rows, _ROW_DTYPES[name]) for name in arrays),
            logits=logits,
            **arrays,
        )
        if num_rows > 0:
            self._sample(
                (num_rows,),
                (self._threads,),
                out,
                logits,
                *arrays.values(),
                self.vocab_size,
                info.strides[0],
            )

    def token_logprobs(self, out: DeviceLogprobRows, logits: Any, token_ids: Any) -> None:
        """Log-probabilities of token_ids i32[num_rows] and of the k likeliest tokens of a row.

        k is the second axis of `out.top_token_ids`. Where a token id is not in the vocabulary,
        `chosen` is NaN and `ranks` is 0.
        """
        info = self._logits_info(logits)
        num_rows = info.shape[0]
        top_ids, top_logprobs = array_info(out.top_token_ids), array_info(out.top_logprobs)
        check(
            _is_vector(token_ids, num_rows, "int32")
            and _is_vector(out.chosen, num_rows, "float32")
            and _is_vector(out.ranks, num_rows, "int32")
            and (top_ids.dtype, top_logprobs.dtype) == ("int32", "float32")
            and top_ids.shape == top_logprobs.shape
            and len(top_ids.shape) == 2
            and top_ids.shape[0] == num_rows
            and top_ids.shape[1] <= min(MAX_TOP_LOGPROBS, self.vocab_size)
            and top_ids.is_contiguous
            and top_logprobs.is_contiguous,
            logits=logits,
            token_ids=token_ids,
            chosen=out.chosen,
            ranks=out.ranks,
            top_token_ids=out.top_token_ids,
            top_logprobs=out.top_logprobs,
        )
        if num_rows > 0:
            self._token_logprobs(
                (num_rows,),
                (self._threads,),
                out.chosen,
                out.ranks,
                out.top_token_ids,
                out.top_logprobs,
                logits,
                token_ids,
                self.vocab_size,
                top_ids.shape[1],
                info.strides[0],
            )

    def _logits_info(self, logits: Any) -> ArrayInfo:
        """Facts of logits, whose rows may lie any number of elements apart."""
        info = array_info(logits)
        check(
            len(info.shape) == 2
            and info.shape[1] == self.vocab_size
            and info.dtype == "float32"
            and (info.shape[1] == 1 or info.strides[1] == 1),
            logits=logits,
        )
        return info


def _is_vector(array: Any, length: int, dtype: str) -> bool:
    info = array_info(array)
    return info.shape == (length,) and info.dtype == dtype and info.is_contiguous
