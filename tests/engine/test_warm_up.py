"""What only a fresh process can show: kernels compiled by the constructor, threads that stay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rawpaged import LLM
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.scheduler.output import SchedulerOutput
from tests.tiny import LLAMA

SCRIPT = """
import gc, json, sys, threading
from rawpaged.cpu.compiling import Kernel
from rawpaged import LLM, SamplingParams

def count_compiled():
    return sum(k.num_entries for k in gc.get_objects() if type(k) is Kernel)

with LLM(sys.argv[1], num_threads=2, num_gpu_blocks_override=32, max_model_len=128) as llm:
    before = count_compiled()
    for n in (1, 3):
        params = [
            SamplingParams(n=n, max_tokens=4, logprobs=3, prompt_logprobs=2, min_tokens=2),
            SamplingParams(n=n, max_tokens=4, temperature=0.0, repetition_penalty=1.2),
            SamplingParams(n=n, max_tokens=4, top_k=5, top_p=0.9, min_p=0.1, logit_bias={3: 1.0}),
        ]
        llm.generate([[1], [2, 3], list(range(100))], params)
        llm.generate([1], params[0])
    after = count_compiled()
threads = [thread.name for thread in threading.enumerate()]
print(json.dumps({"before": before, "after": after, "threads": threads}))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What the script found, run with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, LLAMA],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_kernel_is_compiled_for_a_request(facts: dict[str, Any]) -> None:
    assert facts["before"] > 10
    assert facts["after"] == facts["before"]


def test_only_the_main_thread_is_left(facts: dict[str, Any]) -> None:
    assert facts["threads"] == ["MainThread"]


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 1}, {"max_model_len": 1}], ids=str)
def test_warm_up_keeps_to_the_limits(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, lengths = ModelRunner.execute, []

    def record(runner: ModelRunner, output: SchedulerOutput, *args: Any) -> Any:
        lengths.append(output.num_tokens)
        return execute(runner, output, *args)

    monkeypatch.setattr(ModelRunner, "execute", record)
    LLM(LLAMA, num_threads=1, num_gpu_blocks_override=4, **limits).close()
    assert lengths == [1]
