"""Every kernel compiles for every architecture, and takes no more than ceilings.csv allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rawpaged.gpu.attention import prefill_instance
from rawpaged.gpu.module import instantiate, source_text
from tests.hostsim.wheels import CudaWheels
from tests.static import nvrtc, sass
from tests.static.ceilings import Row, read_table, violations, write_table
from tests.static.instances import ARCHS, FULL_ARCHS, sm_of, units
from tests.static.measure import Kernel, Measured, measure
from tests.static.update import DOCS, table_text, with_table

pytestmark = pytest.mark.gpusim

NEEDED = {
    "paged_decode": {sass.TENSOR, sass.LOAD_16},
    "paged_reduce": set(),
    "paged_prefill": {sass.TENSOR, sass.LOAD_MATRIX, sass.COPY_16, sass.STORE_16},
    "store_kv": {sass.LOAD_16},
    "gemm": {sass.TENSOR, sass.LOAD_MATRIX, sass.COPY_16},
    "gemm_slice": {sass.TENSOR, sass.LOAD_MATRIX, sass.COPY_16, sass.STORE_16},
    "gemm_reduce": {sass.LOAD_16},
    "few_rows": {sass.TENSOR, sass.LOAD_MATRIX, sass.COPY_16},
    "gemv": {sass.LOAD_16},
    "rms_norm": {sass.LOAD_16},
    "rms_norm_in_place": {sass.LOAD_16},
    "add_rms_norm": {sass.LOAD_16, sass.STORE_16},
    "gather_rows": {sass.LOAD_16, sass.STORE_16},
    "sample": {sass.LOAD_16},
    "token_logprobs": {sass.LOAD_16},
}
"""Instructions that a function lives on; no row of it may be without them."""
WITHOUT_16_BYTES = (
    *("paged_decode_bf16_h16_g8", "paged_decode_bf16_h16_g16"),
    *("paged_decode_f16_h16_g8", "paged_decode_f16_h16_g16"),
    *("gather_rows_2b", "gather_rows_4b"),
)
"""Rows and words that are shorter than 16 bytes a lane."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_stay_within_their_ceilings(arch: str, cuda_wheels: CudaWheels) -> None:
    kernels, warnings = measure(arch, cuda_wheels)
    table = read_table()
    assert not warnings
    broken = [
        text
        for kernel in kernels
        for text in violations(kernel, table.rows.get((kernel.name, arch)))
    ]
    made_with = f"the table was made with NVRTC {table.nvrtc}, here is {nvrtc.nvrtc_version()}"
    assert not broken, "\n".join([*broken, made_with])
    rows = {name for name, row_arch in table.rows if row_arch == arch}
    assert rows == {kernel.name for kernel in kernels}, "rows of kernels that are no more"


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_have_what_their_function_lives_on(arch: str) -> None:
    """Whatever an update of the table writes."""
    table = read_table()
    for unit in units(arch):
        for instance in unit.instances:
            row = table.rows[instance.name, arch]
            needed = NEEDED[instance.declaration.function]
            if instance.name in WITHOUT_16_BYTES:
                needed = needed - {sass.LOAD_16, sass.STORE_16}
            missing = {kind for kind in needed if row.instructions[kind] == 0}
            assert not missing, f"{instance.name} {arch}: no {missing}"
            assert row.blocks > 0


def test_every_function_is_compiled_for_every_architecture() -> None:
    for arch in ARCHS:
        functions = {one.declaration.function for unit in units(arch) for one in unit.instances}
        assert functions == set(NEEDED), arch
        names = [one.name for unit in units(arch) for one in unit.instances]
        assert len(names) == len(set(names)), arch
    assert set(FULL_ARCHS) <= set(ARCHS)
    assert [sm_of(arch) for arch in ARCHS] == [80, 86, 89, 90, 100, 120]


@pytest.mark.parametrize(
    "function", ["paged_decode", "paged_prefill", "gemm", "few_rows", "rms_norm"]
)
def test_both_types_are_compiled_for_every_architecture(function: str) -> None:
    for arch in ARCHS:
        types = {
            parameter.c_type
            for unit in units(arch)
            for one in unit.instances
            for parameter in one.parameters
            if one.declaration.function == function
        }
        assert {"const bf16*", "const half*"} <= types, arch


GOOD = Kernel(
    name="k",
    arch="sm_80",
    function="gemm",
    measured=Measured(120, 1024, 0, 0, {**dict.fromkeys(sass.COUNTED, 7), sass.LOCAL: 0}),
    shared_bytes=2048,
    threads=128,
    min_blocks=3,
    blocks=4,
)
ROW = Row.of(GOOD)


def measured(**changes: Any) -> Kernel:
    return replace(GOOD, measured=replace(GOOD.measured, **changes))


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (measured(registers=121), "k sm_80: 121 registers, ceiling 120"),
        (measured(stack_bytes=8), "k sm_80: 8 stack bytes, ceiling 0"),
        (measured(spill_bytes=4), "k sm_80: 4 spilled bytes, ceiling 0"),
        (
            measured(instructions={**GOOD.measured.instructions, sass.LOCAL: 1}),
            "k sm_80: 1 LDL, STL instructions, ceiling 0",
        ),
        (
            measured(instructions={**GOOD.measured.instructions, sass.TENSOR: 6}),
            "k sm_80: 6 HMMA instructions, floor 7",
        ),
        (replace(GOOD, shared_bytes=2049), "k sm_80: 2049 shared bytes, ceiling 2048"),
        (replace(GOOD, blocks=3), "k sm_80: 3 blocks an SM, floor 4"),
        (replace(GOOD, min_blocks=5), "k sm_80: 4 blocks an SM, launch bounds 5"),
    ],
)
def test_what_is_broken_is_named_with_number_and_limit(kernel: Kernel, text: str) -> None:
    assert violations(kernel, ROW) == [text]


def test_less_than_the_ceilings_is_welcome() -> None:
    assert violations(GOOD, ROW) == []
    assert violations(replace(measured(registers=100), blocks=5, shared_bytes=0), ROW) == []
    (text,) = violations(GOOD, None)
    assert "python -m tests.static.update" in text


def test_table_is_read_as_written(tmp_path: Path) -> None:
    other = replace(ROW, arch="sm_120", registers=255)
    write_table("13.9", [other, ROW], tmp_path / "table.csv")
    table = read_table(tmp_path / "table.csv")
    assert table.nvrtc == "13.9"
    assert list(table.rows.values()) == [ROW, other]
    assert table.rows["k", "sm_120"] == other


def test_documents_show_the_table() -> None:
    document = DOCS.read_text(encoding="utf-8")
    assert with_table(document, table_text(read_table())) == document


def test_a_kernel_that_spills_is_seen(cuda_wheels: CudaWheels) -> None:
    """Prefill keeps its state in 255 registers; bounds that leave it 32 make it spill."""
    good = prefill_instance("bfloat16", "bfloat16", 64)
    spilling = instantiate(
        good.declaration,
        "spilling",
        ("bf16", "bf16", 64, 2, 64),
        types={"T": "bf16", "C": "bf16"},
        threads=1024,
        min_blocks=2,
    )
    compiled = nvrtc.compile_text(source_text("paged_prefill.cu", [spilling]), "sm_80")
    assert compiled.usage["spilling"].registers == 32
    assert compiled.usage["spilling"].spill_bytes > 0
    assert any("pill" in warning for warning in compiled.warnings)
    counts = sass.count_instructions(sass.disassemble(compiled.cubin, cuda_wheels))
    assert counts["spilling"][sass.LOCAL] > 0
