"""Arrays side by side in large mappings, which go with them."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from rawpaged.cpu.backend import CpuBackend
from rawpaged.cpu.weight_memory import WeightMemory


def test_arrays_do_not_overlap_and_begin_with_a_cache_line() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (1,), (0, 4), (1000, 33), (70 << 20,), (7,), (65 << 10, 300)]
    arrays = [memory.empty(shape, np.uint8) for shape in shapes]
    arrays.append(memory.empty((5, 2), np.float32))
    for value, array in enumerate(arrays):
        array[...] = value
    for value, array in enumerate(arrays):
        assert (array == value).all()
        assert array.ctypes.data % 64 == 0
    assert [array.shape for array in arrays[:-1]] == shapes
    assert arrays[-1].dtype == np.float32


def test_a_mapping_goes_with_its_last_array() -> None:
    memory = WeightMemory()
    first, second = memory.empty((100,), np.uint8), memory.empty((100,), np.uint8)
    owner = first.base
    assert isinstance(owner, np.ndarray)
    assert owner is second.base
    gone = weakref.ref(owner)
    del first, owner
    memory.release()
    gc.collect()
    assert gone() is not None
    del second
    gc.collect()
    assert gone() is None


def test_weights_of_a_backend_lie_in_it() -> None:
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    weights = [backend.pack_linear(np.ones((64, 32), np.float32), None) for _ in range(2)]
    first, second = (weight.panels.ctypes.data for weight in weights)
    assert second - first == weights[0].panels.nbytes
    backend.close()


def test_kv_blocks_lie_in_large_pages_of_zeros() -> None:
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    large, small = (backend.new_kv_cache(n, 3, 64, 16) for n in (400, 10))
    backend.close()
    for pool in (large.keys, large.values):
        assert pool.ctypes.data % (2 << 20) == 0
        assert not pool.any()
    assert not small.keys.any()
    assert not small.values.any()
