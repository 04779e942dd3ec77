"""Counted sectors and wavefronts are those of access patterns worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.hostsim.loader import HostLoader
from tests.hostsim.traffic import KernelTraffic, LineTraffic
from tests.hostsim.wheels import CudaWheels

pytestmark = pytest.mark.gpusim

SOURCE = """#line 1 "patterns.cu"
#include "gpu.cuh"
extern "C" __global__ void copy_strided(const float* x, float* y, int stride) {
  y[threadIdx.x] = x[threadIdx.x * stride];
}
extern "C" __global__ void copy_vectors(const Vec16* x, Vec16* y) {
  y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void walk_shared(float* y, int stride) {
  SHARED(float, s, [1024]);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x)
    s[i] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x * stride];
}
extern "C" __global__ void walk_shared_vectors(float* y, int stride) {
  DYN_SMEM(memory);
  Vec16* s = reinterpret_cast<Vec16*>(memory);
  for (int i = threadIdx.x; i < 32 * stride; i += blockDim.x) s[i] = Vec16{};
  __syncwarp();
  const Vec16 v =
      s[threadIdx.x * stride];
  y[threadIdx.x] = __uint_as_float(v.u[1]);
}
"""
NAMES = ["copy_strided", "copy_vectors", "walk_shared", "walk_shared_vectors"]


def count(name: str, *args: Any, threads: int = 32, shared_mem: int = 0) -> KernelTraffic:
    loader = HostLoader(profile=True)
    functions = loader.load(SOURCE, NAMES, max_shared_mem=dict.fromkeys(NAMES, 0))
    functions[name]((1,), (threads,), args, shared_mem=shared_mem)
    return loader.take_traffic()[name]


def line(traffic: KernelTraffic, number: int, array: str, *, write: bool = False) -> LineTraffic:
    found = [
        row
        for row in traffic.lines
        if (row.line, row.array, row.write) == (number, array, write) and row.file == "patterns.cu"
    ]
    assert len(found) == 1, str(traffic)
    return found[0]


@pytest.mark.parametrize(("stride", "sectors"), [(0, 1), (1, 4), (2, 8), (8, 32)])
def test_sectors_of_strided_loads(cuda_wheels: CudaWheels, stride: int, sectors: int) -> None:
    x, y = np.zeros(256, np.float32), np.zeros(32, np.float32)
    traffic = count("copy_strided", x, y, np.int32(stride))
    loads, stores = line(traffic, 3, "x"), line(traffic, 3, "y", write=True)
    assert (loads.requests, loads.cost) == (1, sectors)
    assert (stores.cost, stores.ideal_cost, stores.requested_bytes) == (4, 4, 128)
    assert traffic.sectors == sectors + 4
    assert traffic.ideal_sectors == (4 if stride else 1) + 4
    assert traffic.requested_bytes == (128 if stride else 4) + 128
    assert (traffic.wavefronts, traffic.launches) == (0, 1)


def test_sectors_count_from_where_memory_begins(cuda_wheels: CudaWheels) -> None:
    """As on a GPU, where memory is aligned to 256 bytes; a view may begin anywhere in it."""
    memory, y = np.zeros(100, np.float32), np.zeros(32, np.float32)
    for start, sectors in ((0, 4), (8, 4), (3, 5)):
        traffic = count("copy_strided", memory[start : start + 32], y, np.int32(1))
        assert line(traffic, 3, "x").cost == sectors


def test_vectors_and_arrays(cuda_wheels: CudaWheels) -> None:
    x, y = np.zeros((64, 4), np.float32), np.zeros((64, 4), np.float32)
    traffic = count("copy_vectors", x, y, threads=64)
    assert (line(traffic, 6, "x").requests, line(traffic, 6, "x").cost) == (2, 32)
    assert traffic.array_bytes("x") == traffic.array_bytes("y", write=True) == 1024
    assert traffic.array_bytes("y") == 0


@pytest.mark.parametrize(("stride", "wavefronts"), [(0, 1), (1, 1), (2, 2), (3, 1), (8, 8)])
def test_bank_conflicts_of_words(cuda_wheels: CudaWheels, stride: int, wavefronts: int) -> None:
    traffic = count("walk_shared", np.zeros(32, np.float32), np.int32(stride))
    loads = line(traffic, 13, "")
    assert (loads.requests, loads.cost, loads.ideal_cost) == (1, wavefronts, 1)
    assert line(traffic, 11, "", write=True).requests == 32
    assert traffic.wavefronts == 32 + wavefronts
    assert traffic.ideal_wavefronts == 33


@pytest.mark.parametrize(("stride", "wavefronts"), [(1, 4), (2, 8), (8, 32), (5, 4)])
def test_bank_conflicts_of_vectors(cuda_wheels: CudaWheels, stride: int, wavefronts: int) -> None:
    y = np.zeros(32, np.float32)
    traffic = count("walk_shared_vectors", y, np.int32(stride), shared_mem=512 * stride)
    loads = line(traffic, 21, "")
    assert (loads.cost, loads.ideal_cost) == (wavefronts, 4)


def test_launches_add_up_until_taken(cuda_wheels: CudaWheels) -> None:
    loader = HostLoader(profile=True)
    function = loader.load(SOURCE, NAMES, max_shared_mem=dict.fromkeys(NAMES, 0))["copy_vectors"]
    args = (np.zeros((32, 4), np.float32), np.zeros((32, 4), np.float32))
    for _ in range(3):
        function((1,), (32,), args)
    traffic = loader.take_traffic()["copy_vectors"]
    assert (traffic.launches, traffic.requested_bytes, traffic.sectors) == (3, 3 * 1024, 3 * 32)
    assert "patterns.cu:6" in str(traffic)
    assert loader.take_traffic() == {}
