"""Every CPU kernel compiles for 64-bit ARM, with nothing of x86 in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rawpaged.cpu.features import FEATURES, VARIABLE
from tests.weights.block_model import k_m_types, write_block_model

OLD_TYPES = ("Q4_0", "Q4_1", "Q5_1", "Q8_0")
KERNELS = {
    *("lead", "serve", "dismiss", "embed_rows", "rms_norm_rows", "add_rms_norm_rows"),
    *("rope_and_store_rows", "attention_tasks_float32", "attention_tasks_bfloat16", "merge_slots"),
    *("silu_and_mul_rows", "gather_row_indices", "copy_block_pairs", "list_blocks"),
    *("edit_logits_entries", "sample_rows", "logprob_rows"),
    *("linear_panels_float32", "linear_panels_bfloat16", "quantized_rows_floats"),
    *(f"linear_panels_{name}_floats" for name in (*OLD_TYPES, "Q5_0", "Q4_K", "Q5_K", "Q6_K")),
    "embed_quantized_rows_Q6_K",
}
RUNTIME = re.compile(r"(NRT|nrt|numba|Py[A-Z][a-z]*|Py)_\w+")
"""What Numba brings along on every machine."""
LIBRARY = {"log", "log10", "memcpy", "memset", "sched_yield", "syscall"}


def old_types(name: str) -> str:
    """Matrices of other types make products of dequantised weights."""
    if "embed_tokens" in name or "o_proj" in name:
        return "F16"
    return OLD_TYPES[sum(name.encode()) % len(OLD_TYPES)]


@pytest.mark.timeout(900)
@pytest.mark.skipif(not FEATURES.fma, reason="the host must allow for them, as ARM does")
def test_every_kernel(tmp_path: Path) -> None:
    paths = [
        write_block_model(tmp_path / "k.gguf", k_m_types),
        write_block_model(tmp_path / "old.gguf", old_types),
    ]
    out = tmp_path / "kernels.txt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.cpu.arm_child", str(out), *map(str, paths)],
        capture_output=True,
        text=True,
        # What every 64-bit ARM has; less optimised, for there are many.
        env={**os.environ, VARIABLE: "fma", "NUMBA_OPT": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in out.read_text().splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    for name, size, fused, called in lines:
        assert int(size) > 1000
        if name.startswith(("linear_", "attention_")):
            assert int(fused) >= 50, f"{name} multiplies without NEON"
        unknown = {call for call in called.split(",") if not RUNTIME.fullmatch(call)} - LIBRARY
        assert not unknown, f"{name} calls {unknown}"
