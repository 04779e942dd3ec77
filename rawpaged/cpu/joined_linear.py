"""Linear layers of any weights: of one type, or side by side of several, as files mix them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import QuantizedRows
from rawpaged.cpu.block_types import BLOCK
from rawpaged.cpu.kv_ahead import KVAhead
from rawpaged.cpu.linear import LinearOp, PackedLinear, best_arithmetic, embed_table, pack_linear
from rawpaged.cpu.linear_inputs import Input, empty_input
from rawpaged.cpu.quantized_linear import QuantizedLinear, QuantizedLinearOp, pack_quantized
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.cpu.weight_memory import Allocate

Float32 = npt.NDArray[np.float32]
SingleLinear = PackedLinear | QuantizedLinear


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Weights of different types whose outputs lie side by side."""

    parts: tuple[SingleLinear, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def row_types(self) -> tuple[tuple[str | None, int], ...]:
        return tuple(each for part in self.parts for each in part.row_types)


CpuLinear = SingleLinear | JoinedLinear


def _parts(weight: CpuLinear) -> tuple[SingleLinear, ...]:
    return weight.parts if isinstance(weight, JoinedLinear) else (weight,)


def pack_parts(
    parts: Sequence[npt.NDArray[Any] | QuantizedRows],
    bias: npt.NDArray[Any] | None,
    dtype: str,
    allocate: Allocate = np.empty,
) -> CpuLinear:
    """The rows of all parts as one weight; arrays become panels of `dtype`."""
    packed: list[SingleLinear] = []
    first = 0
    for type_name, group in groupby(parts, key=_type_name):
        rows = [part.blocks if isinstance(part, QuantizedRows) else part for part in group]
        joined = _join(rows)
        own_bias = None if bias is None else bias[first : first + len(joined)]
        if type_name is None:
            packed.append(pack_linear(joined, own_bias, dtype, allocate))
        else:
            packed.append(pack_quantized(type_name, joined, own_bias, allocate))
        first += len(joined)
    return packed[0] if len(packed) == 1 else JoinedLinear(tuple(packed))


def _join(rows: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array; float32 if types differ, as float16 and bfloat16 have none in common."""
    if len(rows) == 1:
        return rows[0]
    has_one_type = len({part.dtype for part in rows}) == 1
    return np.concatenate(rows, dtype=None if has_one_type else np.float32)


def _type_name(part: npt.NDArray[Any] | QuantizedRows) -> str | None:
    return part.type_name if isinstance(part, QuantizedRows) else None


class LinearOps:
    """`linear` and `embed` of any of these weights."""

    def __init__(self, team: ThreadTeam, dtype: str, ahead: KVAhead | None = None) -> None:
        """`dtype`: of the weights that are no blocks; `ahead`: what products fetch beside."""
        self._team = team
        ahead = ahead or KVAhead(team)
        self._plain = LinearOp(team, best_arithmetic(dtype), ahead)
        self._quantized = QuantizedLinearOp(team, ahead=ahead)

    def empty_input(
        self, rows: int, weights: Sequence[CpuLinear], piece: int | None = None
    ) -> Input:
        """Room for x of `linear` with any of the weights, in the form that all of them take.

        float32 where there is none, or where pieces of columns are not whole blocks or pairs.
        """
        forms = {self._form(part) for weight in weights for part in _parts(weight)}
        dtype = forms.pop() if len(forms) == 1 else np.float32
        if piece is not None and piece % (BLOCK if dtype == np.uint8 else 2):
            dtype = np.float32
        return empty_input(rows, weights[0].in_features, dtype)

    def linear(self, out: Float32, x: Input, weight: CpuLinear) -> None:
        """out f32[n, out_features] = x f32[n, in_features] @ W.T + bias.

        x is float32 or of `empty_input`; raises TypeError if that was made for other weights.
        """
        parts = _parts(weight)
        prepared: npt.NDArray[np.uint8] | None = None
        first = 0
        for part in parts:
            columns = out[:, first : first + part.out_features]
            first += part.out_features
            if isinstance(part, PackedLinear):
                self._plain(columns, x, part)
                continue
            if prepared is None:
                prepared = self._quantized.prepare(x)
            self._quantized.multiply(columns, prepared, part)

    def embed(self, out: Float32, token_ids: npt.NDArray[np.int32], table: SingleLinear) -> None:
        """out f32[n, in_features] = rows `token_ids` of the table, exactly."""
        if isinstance(table, QuantizedLinear):
            self._quantized.embed(out, token_ids, table)
        else:
            embed_table(self._team, out, token_ids, table)

    def _form(self, part: SingleLinear) -> npt.DTypeLike:
        return np.uint8 if isinstance(part, QuantizedLinear) else self._plain.input_dtype

    def release(self) -> None:
        """Give memory for activations back."""
        self._plain.release()
        self._quantized.release()
