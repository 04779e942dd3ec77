"""Kernels in Numba-CUDA, in its simulator, against the cases of all backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numba
import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.errors import BackendError
from rawpaged.gpu.module import Function
from tests.hostsim.device import HostDevice
from tests.ops.kv_elements import NUMPY_TYPES, poisoned_pool, quantised, raw
from tests.ops.row_cases import (
    edit_case,
    embed_case,
    normal,
    rope_case,
    silu_case,
    stored,
)

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("numba_cuda")]

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
Launch = tuple[tuple[int, ...], tuple[int, ...]]


class NoCompiler:
    """A Loader for tests that have no CUDA C++."""

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        raise AssertionError(f"{names} are not Numba's")


class SizedDevice(HostDevice):
    """A host device that launches all kernels in one size, or as they ask."""

    def __init__(self, launch: Launch | None) -> None:
        super().__init__(NoCompiler())
        self._launch = launch

    def jit(self, kernel: Callable[..., None]) -> Function:
        from rawpaged.gpu.numba_launch import NumbaFunction

        function = NumbaFunction(kernel, self.stream)

        def sized(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[Any, ...],
            *,
            shared_mem: int = 0,
        ) -> None:
            if self._launch is not None:
                # Kernels give the same result in any size, but of as many dimensions.
                grid, block = self._launch[0][: len(grid)], self._launch[1][: len(block)]
            function(grid, block, args, shared_mem=shared_mem)

        return sized


@pytest.fixture(
    params=[None, ((1, 1), (1, 1)), ((2, 3), (4, 2))], ids=["as asked", "one thread", "few threads"]
)
def device(request: pytest.FixtureRequest) -> SizedDevice:
    return SizedDevice(request.param)


@pytest.fixture(params=list(DTYPES))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def nan(dtype: Any, *shape: int) -> npt.NDArray[Any]:
    return np.full(shape, np.nan, DTYPES.get(dtype, dtype))


def assert_rounded(out: npt.NDArray[Any], expected: npt.NDArray[np.float64], dtype: str) -> None:
    """Whether out is expected with one rounding to dtype, after a float32 computation."""
    rtol = 1.01 * UNIT_ROUNDOFF[dtype]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=rtol, atol=1e-5)


def test_embed_gives_the_stored_rows_exactly(device: SizedDevice, dtype: str) -> None:
    from rawpaged.gpu.embedding import Embedding

    case = embed_case()
    table = nan(dtype, 77, 48)
    table[:, :40] = case.table
    out = nan(np.float32, 6, 40)
    Embedding(device)(out, case.token_ids, table)
    np.testing.assert_array_equal(out, stored(case.table, dtype)[case.token_ids])


def test_silu_and_mul(device: SizedDevice, dtype: str) -> None:
    from rawpaged.gpu.activation import SiluAndMul

    case = silu_case(lambda x: stored(x, dtype))
    out = nan(dtype, 9, 112)
    SiluAndMul(device)(out, case.gate_up.astype(DTYPES[dtype]))
    assert_rounded(out, case.expected, dtype)


@pytest.mark.parametrize(
    ("cache_dtype", "head_dim"), [(None, 16), (None, 80), ("fp8_e4m3", 16), ("int8", 16)]
)
def test_rope_with_the_store(
    device: SizedDevice, dtype: str, cache_dtype: str | None, head_dim: int
) -> None:
    from rawpaged.gpu.rope import RopeStore

    # Two query heads and one key head are rotated; two heads of values, of which one is taken.
    case = rope_case(lambda x: stored(x, dtype), head_dim)
    heads = case.x.astype(DTYPES[dtype])
    q, k, v = heads[:, :2], heads[:, 2:3], heads[:, 3:4]
    slots = np.array([9, -1, 0, 4], np.int64)
    kept = slots >= 0
    pools = [poisoned_pool((3, 1, 4, head_dim), cache_dtype or dtype) for _ in range(2)]
    before = [pool.reshape(12, head_dim).copy() for pool in pools]
    scales = [np.array([scale], np.float32) for scale in (0.03, 0.04)]
    key_scale, value_scale = scales if cache_dtype else (None, None)
    op = RopeStore(device, dtype=dtype, cache_dtype=cache_dtype or dtype)
    keys, values = (raw(pool, cache_dtype or dtype) for pool in pools)
    args = (q, k, v, case.positions, case.cos_sin, keys, values, slots)
    op(*args, key_scale=key_scale, value_scale=value_scale)

    assert_rounded(q, case.expected[:, :2], dtype)
    np.testing.assert_array_equal(heads[:, 2:], case.x[:, 2:])
    by_slot = [pool.reshape(12, head_dim) for pool in pools]
    stored_keys, expected = by_slot[0][slots[kept]], case.expected[kept, 2]
    if cache_dtype is None:
        assert_rounded(stored_keys, expected, dtype)
    else:  # once rounded, float32 may have gone to the other neighbour
        rtol, steps = {"fp8_e4m3": (2.0**-4, 2.0**-10), "int8": (0.0, 0.5)}[cache_dtype]
        numbers = stored_keys.astype(np.float64) * scales[0]
        atol = float(steps * scales[0][0]) + 1e-5
        np.testing.assert_allclose(numbers, expected, rtol=rtol, atol=atol)
    exact = quantised(case.x[kept, 3:4], scales[1], cache_dtype or dtype)[:, 0]
    np.testing.assert_array_equal(by_slot[1][slots[kept]], exact)
    for pool, old in zip(by_slot, before, strict=True):
        old[slots[kept]] = pool[slots[kept]]
        assert pool.tobytes() == old.tobytes()


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "int8"])
def test_elements_of_bytes_bit_for_bit(cache_dtype: str) -> None:
    """The CPU's test of the same name has more numbers; both are held against NumPy."""
    from rawpaged.gpu.kv_elements import make_element

    special = [0.0, -0.0, np.inf, -np.inf, 448, 463.9, 464, 480, -449, 126.5, 127.5, 0.5, 1.5, 2.5]
    special += [2.0**-10, 3 * 2.0**-10, 2.0**-6, 2.0**-6 * (1 - 2.0**-24), 1.0625, 1.1875, 1e-40]
    rng = np.random.default_rng(0)
    spread = np.exp(rng.uniform(-10, 8, 500)) * rng.choice([-1, 1], 500)
    x = np.array([*special, *spread], np.float32)
    element = make_element(lambda x: x, cache_dtype)
    bits = np.uint8 if cache_dtype == "fp8_e4m3" else np.int8
    for scale in np.array([1.0, 0.3], np.float32):
        found = np.array([element(each, scale) for each in x], bits)
        expected = quantised(x[:, None, None], scale[None], cache_dtype)[:, 0, 0]
        assert found.tobytes() == expected.tobytes()
    nan = np.array([element(np.float32(np.nan), np.float32(1))], bits)
    assert np.isnan(nan.view(NUMPY_TYPES[cache_dtype]).astype(np.float32)[0]) or nan[0] == -127


def test_edits_follow_the_definitions(device: SizedDevice) -> None:
    from rawpaged.gpu.logit_edits import EditLogits

    case = edit_case()
    logits = case.logits.copy()
    EditLogits(device)(logits, case.edits)
    np.testing.assert_allclose(logits, case.expected, rtol=1e-6)


def test_token_ids_are_taken_from_where_they_were_drawn(device: SizedDevice) -> None:
    from rawpaged.gpu.run_ahead import TakeTokenIds

    drawn = np.array([7, -1, 2**31 - 1, 0, 9], np.int32)
    token_ids = np.array([-5, 3, 0, -1, -3, -2, 2**31 - 1, -1, -4], np.int32)
    expected = [drawn[-1 - each] if each < 0 else each for each in token_ids.tolist()]
    # What was drawn from broken logits is a token all the same.
    expected[5] = np.int32(0)
    TakeTokenIds(device)(token_ids, drawn)
    assert token_ids.tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 70])
def test_masks_forbid_what_has_no_bit(device: SizedDevice, vocab_size: int) -> None:
    from rawpaged.gpu.logit_edits import MaskLogits

    rng = np.random.default_rng(vocab_size)
    logits = normal(rng, 4, vocab_size)
    allowed = rng.random((2, -(-vocab_size // 32) * 32)) < 0.5
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    expected = logits.copy()
    for j, row in enumerate((3, 1)):
        expected[row, ~allowed[j, :vocab_size]] = -np.inf
    MaskLogits(device)(logits, masks, np.array([3, 1], np.int32))
    np.testing.assert_array_equal(logits, expected)


def test_blocks_are_copied_within_a_pool_and_between_two(device: SizedDevice, dtype: str) -> None:
    from rawpaged.gpu.block_copy import CopyBlocks

    rng = np.random.default_rng(1)
    layers = [normal(rng, 6, 2, 4, 8).astype(DTYPES[dtype]) for _ in range(2)]
    others = [nan(dtype, 3, 2, 4, 8) for _ in layers]
    before = [layer.copy() for layer in layers]
    copy = CopyBlocks(device)
    copy(layers, layers, np.array([[0, 5], [3, 1]], np.int64))
    for layer, old in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer, old[[0, 3, 2, 3, 4, 0]])
    copy(others, layers, np.array([[5, 2], [2, 0]], np.int64))
    for other, old in zip(others, before, strict=True):
        np.testing.assert_array_equal(other[[2, 0]], old[[0, 2]])
        assert np.isnan(other[1].astype(np.float32)).all()


def test_arrays_of_a_gpu_lose_their_stream_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    from rawpaged.gpu.numba_launch import numba_argument

    interface = {
        "version": 3,
        "shape": (2, 3),
        "strides": (16, 2),
        "typestr": "<V2",
        "descr": [("", "<V2")],
        "data": (4096, False),
        "stream": 7,
    }
    monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", 0)
    array = SimpleNamespace(__cuda_array_interface__=interface)
    seen = numba_argument(array).__cuda_array_interface__
    changed = {"typestr": "<u2", "descr": [("", "<u2")], "stream": None}
    assert seen == {**interface, **changed}
    assert interface["stream"] == 7, "the array's own description has changed"
    with pytest.raises(TypeError, match="ndarray has no __cuda_array_interface__"):
        numba_argument(np.zeros(3))


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    from rawpaged.gpu.numba_kernels import conversions

    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8]
    rng = np.random.default_rng(2)
    random = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    # Rounding the bits of these two as a number's would give infinity, and zero.
    nans = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    values = np.concatenate([np.array(special, np.float32), nans, random])
    load, store = conversions("bfloat16")
    mine = np.array([store(x) for x in values], np.uint16)
    with np.errstate(invalid="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(mine[number], theirs[number])
    assert all(np.isnan(load(bits)) for bits in mine[~number])


def test_no_rows_launch_nothing(device: SizedDevice, dtype: str) -> None:
    from rawpaged.gpu.activation import SiluAndMul
    from rawpaged.gpu.block_copy import CopyBlocks
    from rawpaged.gpu.embedding import Embedding
    from rawpaged.gpu.rope import RopeStore
    from rawpaged.gpu.run_ahead import TakeTokenIds

    ids = np.zeros(0, np.int32)
    Embedding(device)(nan(np.float32, 0, 8), ids, nan(dtype, 4, 8))
    SiluAndMul(device)(nan(dtype, 0, 8), nan(dtype, 0, 16))
    none, heads = nan(dtype, 0, 2, 8), nan(dtype, 3, 2, 4, 8)
    rope_store = RopeStore(device, dtype=dtype, cache_dtype=dtype)
    angles = (ids, nan(np.float32, 4, 8))
    rope_store(none, none, none, *angles, heads, heads.copy(), np.zeros(0, np.int64))
    pool = [nan(dtype, 4, 8)]
    CopyBlocks(device)(pool, pool, np.zeros((0, 2), np.int64))
    TakeTokenIds(device)(ids, ids)


def test_arrays_that_do_not_fit_are_refused() -> None:
    from rawpaged.gpu.activation import SiluAndMul
    from rawpaged.gpu.block_copy import CopyBlocks
    from rawpaged.gpu.embedding import Embedding
    from rawpaged.gpu.logit_edits import EditLogits, MaskLogits
    from rawpaged.gpu.rope import RopeStore
    from rawpaged.gpu.run_ahead import TakeTokenIds

    device = SizedDevice(((1,), (1,)))
    ids, slots = np.zeros(3, np.int32), np.zeros(3, np.int64)
    f32, half = np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float16)
    heads, pool = np.zeros((3, 2, 8), np.float16), np.zeros((4, 2, 4, 8), np.float16)
    edits = edit_case().edits

    def rope_store(device: SizedDevice) -> RopeStore:
        return RopeStore(device, dtype="float16", cache_dtype="float16")

    wrong: list[tuple[Any, tuple[Any, ...]]] = [
        (Embedding, (f32, ids, f32)),
        (Embedding, (f32, ids[:2], half)),
        (Embedding, (f32, ids, half[:, :7])),
        (SiluAndMul, (half, half)),
        (SiluAndMul, (f32, np.zeros((3, 16), np.float32))),
        (rope_store, (heads, heads, heads, ids[:2], f32, pool, pool, slots)),
        (rope_store, (heads, heads, heads, ids, f32[:, :6], pool, pool, slots)),
        (rope_store, (heads.astype(np.float32), heads, heads, ids, f32, pool, pool, slots)),
        (rope_store, (heads, heads, heads, ids, f32, pool, pool[:3], slots)),
        (rope_store, (heads, heads, heads, ids, f32, pool, pool, ids)),
        (rope_store, (heads, heads[:, :1], heads, ids, f32, pool, pool, slots)),
        (EditLogits, (f32[:2], edits)),
        (MaskLogits, (f32, np.zeros((3, 2), np.int32), ids)),
        (CopyBlocks, ([pool], [pool[:, :1]], np.zeros((1, 2), np.int64))),
        (CopyBlocks, ([pool], [pool], np.zeros((1, 2), np.int32))),
        (TakeTokenIds, (ids, slots)),
        (TakeTokenIds, (ids[::2], ids)),
    ]
    for op, args in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            op(device)(*args)


def test_scales_go_with_caches_of_bytes_and_only_with_them() -> None:
    from rawpaged.gpu.rope import RopeStore

    device = SizedDevice(((1,), (1,)))
    ids, slots, f32 = np.zeros(3, np.int32), np.zeros(3, np.int64), np.zeros((3, 8), np.float32)
    heads, pool = np.zeros((3, 2, 8), np.float16), np.zeros((4, 2, 4, 8), np.uint8)
    scale = np.ones(2, np.float32)
    args = (heads, heads, heads, ids, f32, pool, pool.copy(), slots)
    op = RopeStore(device, dtype="float16", cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="needs key_scale and value_scale"):
        op(*args, key_scale=scale)
    with pytest.raises(ValueError, match="do not fit"):
        op(*args, key_scale=scale, value_scale=scale[:1])
    half = pool.astype(np.float16)
    plain = RopeStore(device, dtype="float16", cache_dtype="float16")
    with pytest.raises(ValueError, match="has no scales"):
        plain(*args[:5], half, half.copy(), slots, key_scale=scale)
    with pytest.raises(BackendError, match="cache_dtype='float16' is not bfloat16"):
        RopeStore(device, dtype="bfloat16", cache_dtype="float16")
