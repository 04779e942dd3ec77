"""The whole engine on processors that this machine is not: AVX2, no dot products, plain x86-64.

In processes of their own, as what kernels are made for is settled when they are imported. Kernels
of each are compiled anew, so no more models are run than there are kinds of kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.cpu.features import FEATURES, VARIABLE
from tests.engine.greedy_child import GreedyRunner
from tests.engine.helpers import golden, recorded_logits, request, run, tiny_engine
from tests.weights.builders import write_gguf

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FEATURES.avx512f, reason="the host must be able to run all of them"),
]

TARGETS = {
    "plain": {"NUMBA_CPU_NAME": "x86-64"},
    "avx2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
    "no dot products": {VARIABLE: "fma,avx512f"},
}
DTYPES = {"plain": ("float32", "Q4_1"), "avx2": ("bfloat16", "Q4_1"), "no dot products": ("Q4_1",)}

Answers = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", type_name="Q4_1")


@pytest.fixture(scope="module")
def answers(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Of each target: what `tests.engine.greedy_child` writes; they compile at the same time."""
    out = tmp_path_factory.mktemp("answers")
    models = {"float32": "llama", "bfloat16": "llama", "Q4_1": str(gguf_path)}
    children = {}
    for target, environment in TARGETS.items():
        pairs = [
            word
            for dtype in DTYPES[target]
            for word in ("bfloat16" if dtype == "Q4_1" else dtype, models[dtype])
        ]
        children[target] = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.greedy_child", str(out / target), *pairs],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            cwd=Path(__file__).parents[2],
        )
    found = {}
    for target, child in children.items():
        _, errors = child.communicate()
        assert child.returncode == 0, f"{target}: {errors}"
        with np.load(out / f"{target}.npz") as arrays:
            names = dict(enumerate(DTYPES[target]))
            found[target] = {
                f"{kind}_{dtype}": arrays[f"{kind}_{i}"]
                for i, dtype in names.items()
                for kind in ("ids", "logits")
            }
    return found


def golden_prompt() -> list[int]:
    expected = golden("llama")
    ids: list[int] = expected["input_ids"][: int(expected["greedy_prompt_len"])].tolist()
    return ids


def dequantised_logits(path: Path, ids: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """f32[len(ids), vocab_size]: after the golden prompt and all but the last of `ids`."""
    prompt = golden_prompt()
    engine = tiny_engine(str(path), num_blocks=300, runner_type=GreedyRunner)
    run(engine, [request(str(n), [*prompt, *ids[:n]], max_tokens=1) for n in range(len(ids))])
    rows = recorded_logits(engine)
    engine.close()
    return np.stack([np.frombuffer(rows[str(n)][0], np.float32) for n in range(len(ids))])


def relative_error(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Root of the mean square of differences, in deviations of what is expected."""
    return float(np.sqrt(np.square(got - expected).mean()) / expected.std())


def test_float32(answers: dict[str, Answers]) -> None:
    expected, got = golden("llama"), answers["plain"]
    assert got["ids_float32"].tolist() == expected["greedy_ids"].tolist()
    first = expected["logits"][len(golden_prompt()) - 1]
    np.testing.assert_allclose(got["logits_float32"][0], first, rtol=0, atol=2e-4)


def test_bfloat16(answers: dict[str, Answers]) -> None:
    first = golden("llama")["logits"][len(golden_prompt()) - 1]
    error = relative_error(answers["avx2"]["logits_bfloat16"][0], first)
    assert 1e-4 < error < 0.02


@pytest.mark.parametrize("target", TARGETS)
def test_weights_in_blocks(answers: dict[str, Answers], gguf_path: Path, target: str) -> None:
    got = answers[target]
    exact = dequantised_logits(gguf_path, got["ids_Q4_1"])
    assert 1e-4 < relative_error(got["logits_Q4_1"], exact) < 0.05


def test_the_same_bits_where_products_are_fused(answers: dict[str, Answers]) -> None:
    """Vectors of other widths are sums in the same order."""
    bits = {name: got["logits_Q4_1"].tobytes() for name, got in answers.items()}
    assert bits["avx2"] == bits["no dot products"] != bits["plain"]
