"""Occupancy agrees with NVIDIA's own calculator, cuda_occupancy.h of the runtime's wheel."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.hostsim.wheels import CudaWheels, find_compiler
from tests.static.occupancy import MULTIPROCESSORS, blocks_per_sm

pytestmark = pytest.mark.gpusim

POINTS = list(
    itertools.product(
        MULTIPROCESSORS,
        (32, 96, 128, 256, 512, 1024),
        (16, 33, 64, 96, 128, 168, 255),
        (0, 100, 2048, 17_664, 33_000, 65_536, 98_304, 101_376, 166_912, 232_448),
    )
)
PROGRAM = """
#include <cstdio>
#include <climits>
#include "cuda_occupancy.h"
int main() {
  int sm, threads, registers, sm_threads;
  size_t shared, sm_shared, most_shared;
  while (scanf("%d %d %d %zu %d %zu %zu", &sm, &threads, &registers, &shared, &sm_threads,
               &sm_shared, &most_shared) == 7) {
    cudaOccDeviceProp device;
    device.computeMajor = sm / 10;
    device.computeMinor = sm % 10;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = sm_threads;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = sm_shared;
    device.numSms = 100;
    device.sharedMemPerBlockOptin = most_shared;
    device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = most_shared;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(
        &result, &device, &kernel, &state, threads, shared);
    printf("%d\\n", error ? 0 : result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_blocks_are_those_of_nvidias_calculator(cuda_wheels: CudaWheels, tmp_path: Path) -> None:
    source, program = tmp_path / "occupancy.cc", tmp_path / "occupancy"
    source.write_text(PROGRAM, encoding="utf-8")
    include = [f"-I{folder}" for folder in cuda_wheels.include]
    command = [find_compiler(), *include, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    lines = []
    for sm, threads, registers, shared in POINTS:
        limits = MULTIPROCESSORS[sm]
        numbers = (limits.threads, limits.shared_bytes, limits.most_shared_bytes)
        lines.append(" ".join(map(str, (sm, threads, registers, shared, *numbers))))
    answer = subprocess.run(
        [str(program)], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    for (sm, threads, registers, shared), blocks in zip(
        POINTS, map(int, answer.stdout.split()), strict=True
    ):
        own = blocks_per_sm(sm, threads=threads, registers=registers, shared_bytes=shared)
        assert own == blocks, f"{sm=} {threads=} {registers=} {shared=}"


def test_points_worked_out_by_hand() -> None:
    """From the programming guide's table: 64 Ki registers, 2048 threads, 228 KiB on 9.0."""
    assert blocks_per_sm(90, threads=128, registers=32, shared_bytes=0) == 16  # threads
    assert blocks_per_sm(90, threads=128, registers=128, shared_bytes=0) == 4  # registers
    assert blocks_per_sm(90, threads=256, registers=64, shared_bytes=64 * 1024) == 3  # shared
    assert blocks_per_sm(90, threads=32, registers=16, shared_bytes=0) == 32  # blocks
    assert blocks_per_sm(86, threads=128, registers=64, shared_bytes=100 * 1024) == 0
    assert blocks_per_sm(86, threads=1024, registers=65, shared_bytes=0) == 0
