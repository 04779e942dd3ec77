"""Measures all kernels anew and writes ceilings.csv and the section of docs/gpu.md.

    python -m tests.static.update

Look at the difference before it is committed: numbers that got worse need a reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hostsim.wheels import find_cuda_wheels
from tests.static import nvrtc, sass
from tests.static.ceilings import Row, Table, read_table, violations, write_table
from tests.static.instances import ARCHS
from tests.static.measure import measure

DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN = "<!-- static gates: written by python -m tests.static.update -->"
END = "<!-- end of static gates -->"
SHOWN_ARCH = "sm_90a"
SHOWN = (
    "paged_decode_bf16_h64_g8",
    "paged_decode_bf16_h128_g8",
    "paged_decode_bf16_h128_g16",
    "paged_decode_bf16_h128_g8_fp8",
    "paged_decode_bf16_h256_g8",
    "paged_reduce_bf16_h128",
    "paged_prefill_bf16_h64_m128_n64",
    "paged_prefill_bf16_h128_m128_n64",
    "paged_prefill_bf16_h128_m128_n64_fp8",
    "paged_prefill_bf16_h256_m64_n32",
    "store_kv_bf16_h128",
    "store_kv_bf16_h128_fp8",
    "few_rows_bf16_bf16_store_8x16_s3",
    "few_rows_bf16_bf16_store_16x32_s3",
    "few_rows_bf16_bf16_store_32x32_s3",
    "gemm_bf16_bf16_store_64x64x64_s4",
    "gemm_bf16_bf16_store_64x128x32_s4",
    "gemm_bf16_bf16_store_128x128x64_s3",
    "gemm_bf16_bf16_silu_mul_128x128x64_s3",
    "gemv_bf16_bf16_store_m1",
    "add_rms_norm_bf16_d4096",
    "gather_rows_16b",
    "sample_f32_t1024",
    "token_logprobs_f32_t1024",
)
"""One of each function, and what differs most from it."""


def table_text(table: Table) -> str:
    """A Markdown table of SHOWN; 16-byte loads are those to registers and to shared memory."""
    lines = [
        f"{SHOWN_ARCH}, NVRTC {table.nvrtc}:",
        "",
        "| kernel | registers | shared memory | blocks/SM | HMMA | 16-byte loads |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in SHOWN:
        row = table.rows[name, SHOWN_ARCH]
        loads = row.instructions[sass.LOAD_16] + row.instructions[sass.COPY_16]
        shared = f"{row.shared_bytes / 1024:.1f} KiB"
        tensor = row.instructions[sass.TENSOR]
        cells = (f"`{name}`", row.registers, shared, row.blocks, tensor, loads)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def with_table(document: str, table: str) -> str:
    """The document with the text between BEGIN and END replaced."""
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> int:
    wheels = find_cuda_wheels()
    rows, refused = [], []
    for arch in ARCHS:
        print(f"{arch} ...", file=sys.stderr, flush=True)
        kernels, warnings = measure(arch, wheels)
        rows += [Row.of(kernel) for kernel in kernels]
        # Spills and missed launch bounds, which no row allows.
        refused += [text for kernel in kernels for text in violations(kernel, Row.of(kernel))]
        refused += [f"{arch}: {warning}" for warning in warnings]
    write_table(nvrtc.nvrtc_version(), rows)
    document = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(with_table(document, table_text(read_table())), encoding="utf-8")
    for text in refused:
        print(text, file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
