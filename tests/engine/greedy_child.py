"""What another process answers, for processors that this one is not: greedy ids and logits.

    python -m tests.engine.greedy_child OUT DTYPE MODEL ...

OUT: for pair i, `ids_i` int64[NUM_TOKENS] and `logits_i` f32[NUM_TOKENS, vocab_size] of tokens
generated after `golden("llama")`'s prompt. MODEL is a golden checkpoint's name, or a GGUF file's
absolute path, whose weights then stay in blocks.

Tokens are the likeliest ones as NumPy finds them: the kernel that samples takes longer to compile
than most others together, and has tests of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.engine.sampler import SampledToken
from rawpaged.request import Request
from tests.engine.helpers import RecordingRunner, golden, recorded_logits, request, run, tiny_engine

NUM_TOKENS = 40


class GreedyRunner(RecordingRunner):
    def _sample(self, logits: Any, requests: list[Request]) -> dict[str, SampledToken]:
        sampled = {}
        for each, row in zip(requests, self.backend.download(logits), strict=True):
            self.logits[each.request_id].append(row.tobytes())
            sampled[each.request_id] = SampledToken(int(row.argmax()), None)
        return sampled


def answer(dtype: str, model: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    expected = golden("llama")
    prompt = expected["input_ids"][: int(expected["greedy_prompt_len"])].tolist()
    engine = tiny_engine(
        model, dtype=dtype, keep_quantized=Path(model).is_absolute(), runner_type=GreedyRunner
    )
    tokens = run(engine, [request("a", prompt, max_tokens=NUM_TOKENS)])["a"]
    rows = [np.frombuffer(row, np.float32) for row in recorded_logits(engine)["a"]]
    engine.close()
    return np.array(tokens), np.stack(rows)


def main(out: str, *pairs: str) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for i, (dtype, model) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
        arrays[f"ids_{i}"], arrays[f"logits_{i}"] = answer(dtype, model)
    savez: Any = np.savez  # whose types do not allow for names
    savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
