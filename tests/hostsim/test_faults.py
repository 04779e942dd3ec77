"""Every planted fault is reported by its kind, at its line, in every order."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawpaged.gpu.module import Function
from tests.hostsim.conftest import ORDERS
from tests.hostsim.loader import HostLoader, HostSimError, parse_signatures
from tests.hostsim.wheels import CudaWheels

pytestmark = pytest.mark.gpusim

SOURCE = Path(__file__).with_name("faults.cu")


@dataclass(frozen=True, slots=True)
class Case:
    """How a kernel is launched: x and y are float32 unless `arrays` says otherwise."""

    threads: int = 64
    blocks: int = 1
    shared_mem: int = 0
    arrays: dict[str, Any] = field(default_factory=dict)


def zeros(length: int, dtype: type[np.generic] = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(length, dtype)


INTEGERS = {"x": zeros(64, np.int32), "y": zeros(64, np.int32)}
HAND_OVER = Case(blocks=3, arrays={"y": zeros(256), "count": zeros(1, np.uint32)})
CASES = {
    "follow_a_bad_block_id": Case(arrays={"block_table": np.array([1000], np.int32)}),
    "read_through_null": Case(arrays={"offset": zeros(1, np.int32)}),
    "load_misaligned_vector": Case(threads=8),
    "use_too_much_dynamic_shared": Case(shared_mem=128),
    "write_what_a_whole_warp_reads": Case(threads=32),
    "miss_syncwarp": Case(threads=32),
    "sync_half_a_warp": Case(threads=32),
    "take_a_shuffle_for_a_barrier": Case(threads=32),
    "read_a_copy_in_flight": Case(arrays={"x": zeros(256)}),
    "wait_for_a_copy_never_committed": Case(arrays={"x": zeros(256)}),
    "read_others_copies_without_barrier": Case(arrays={"x": zeros(256)}),
    "write_under_a_copy": Case(arrays={"x": zeros(256)}),
    "change_the_source_of_a_copy": Case(arrays={"x": zeros(256)}),
    "copy_misaligned": Case(arrays={"x": zeros(256)}),
    "load_matrices_from_global": Case(threads=32, arrays={"x": zeros(256)}),
    "shuffle_half_a_warp": Case(threads=32),
    "shuffle_from_outside_the_mask": Case(threads=32),
    "meet_in_different_calls": Case(threads=32),
    "wait_for_each_other": Case(threads=32),
    "write_one_cell_from_two_blocks": Case(blocks=2),
    "read_what_others_add_to": Case(arrays={"y": zeros(65)}),
    "exchange_through_global_without_barrier": Case(arrays={"y": zeros(128)}),
    "hand_over_without_fence": HAND_OVER,
    "hand_over_without_barrier": HAND_OVER,
    "wait_for_another_block": Case(arrays={"count": zeros(1, np.uint32)}),
    "overflow_a_row_offset": Case(arrays={"row": np.int32(70000), "stride": np.int32(40000)}),
    "shift_too_far": Case(arrays=INTEGERS),
    "divide_by_zero": Case(arrays=INTEGERS),
    "convert_what_does_not_fit": Case(
        arrays={"x": np.ones(64, np.float32), "y": zeros(64, np.int32)}
    ),
}


def planted_faults() -> dict[str, set[tuple[str, int]]]:
    """Kinds and lines that may be reported, by kernel."""
    faults: dict[str, set[tuple[str, int]]] = {}
    kernel = ""
    for number, line in enumerate(SOURCE.read_text().splitlines(), start=1):
        if match := re.match(r'extern "C" __global__ void (\w+)\(', line):
            kernel = match[1]
            faults[kernel] = set()
        if match := re.search(r"// fault: ([\w-]+)$", line):
            faults[kernel].add((match[1], number))
    return faults


FAULTS = planted_faults()


@pytest.fixture(params=ORDERS, ids=[order for order, _ in ORDERS], scope="module")
def functions(request: pytest.FixtureRequest, cuda_wheels: CudaWheels) -> dict[str, Function]:
    order, seed = request.param
    loader = HostLoader(order=order, seed=seed, max_accesses=10**5)
    text = f'#line 1 "{SOURCE.name}"\n{SOURCE.read_text()}'
    return loader.load(text, list(FAULTS), max_shared_mem=dict.fromkeys(FAULTS, 0))


def launch(function: Function, kernel: str) -> None:
    case = CASES.get(kernel, Case())
    arrays = {"x": zeros(64), "y": zeros(64)} | case.arrays
    parameters = parse_signatures(SOURCE.read_text())[kernel].parameters
    args = [arrays[parameter.name] for parameter in parameters]
    # A fault may come after some writes, and the cases are shared.
    copies = tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args)
    function((case.blocks,), (case.threads,), copies, shared_mem=case.shared_mem)


def test_there_are_faults_of_every_kind() -> None:
    kinds = {kind for places in FAULTS.values() for kind, _ in places}
    assert len(FAULTS) >= 15
    assert all(FAULTS.values())
    runtime = "".join(path.read_text() for path in SOURCE.parent.glob("*.cc"))
    runtime += SOURCE.with_name("hostsim.h").read_text()
    calls = r'\b(?:fail|fail_at|check_order|SUSPECT)\([^;"]*"([a-z-]+)",'
    assert kinds == set(re.findall(calls, runtime))


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_fault_is_reported_at_its_line(kernel: str, functions: dict[str, Function]) -> None:
    with pytest.raises(HostSimError) as caught:
        launch(functions[kernel], kernel)
    assert (caught.value.kind, caught.value.line) in FAULTS[kernel], str(caught.value)
    assert caught.value.file == SOURCE.name
    assert re.search(r"\[block \(\d+, 0, 0\) thread \(\d+, 0, 0\)\]$", str(caught.value))
