"""Records which beams survive: `python -m bench.capacity.beams`.

How much beams share depends on the model and the text, so a simulation over lengths needs a record
of a real search. This one searches with a model of this project, keeps of every step which beam of
the step before each beam goes on from, and writes that to bench/capacity/data. Takes some minutes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rawpaged import LLM, SamplingParams
from rawpaged.outputs import TokenLogprobs

RECORD = Path(__file__).parent / "data" / "beam_parents.json"
WIDTHS = (2, 4, 6)

PROMPTS = (
    "Explain how a bicycle stays upright, for a curious child.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the main differences between a virus and a bacterium?",
    "Give me a recipe for a vegetable soup, step by step.",
    "Write a Python function that checks whether a string is a palindrome, and explain it.",
    "Summarise the causes of the First World War.",
    "I have a job interview tomorrow. How should I prepare?",
    "Describe the water cycle.",
    "Write a poem about the sea in winter.",
    "Compare electric cars and petrol cars: costs, range and environment.",
    "Translate into French and explain the grammar: The children were playing in the garden.",
    "Give three tips for staying healthy.",
)


@dataclass(slots=True)
class _Search:
    """Beams of one prompt, best first."""

    prompt: list[int]
    beams: list[tuple[float, list[int]]]
    parents: list[list[int]]

    def extend(
        self, width: int, eos_token_ids: frozenset[int], candidates: Sequence[TokenLogprobs]
    ) -> None:
        """One step: the best `width` continuations of all beams together, of equal length."""
        found = [
            (score + entry.logprob, -parent, token_id)
            for parent, ((score, _), tokens) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, entry in tokens.items()
            if token_id not in eos_token_ids
        ]
        best = heapq.nlargest(width, found)
        self.parents.append([-parent for _, parent, _ in best])
        self.beams = [
            (score, [*self.beams[-parent][1], token_id]) for score, parent, token_id in best
        ]


def record_parents(
    llm: LLM, prompts: Sequence[str], width: int, num_steps: int
) -> list[list[list[int]]]:
    """For each prompt and step, the parent of each beam; no search ends early.

    The first step is left out: there every beam comes from the prompt.
    """
    assert llm.tokenizer is not None, "a record needs a model with a tokenizer"
    eos_token_ids = frozenset(llm.model_config.eos_token_ids)
    searches = [
        _Search(llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]), [(0.0, [])], [])
        for prompt in prompts
    ]
    # Two for each beam, and the end of the sequence does not count.
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * width, ignore_eos=True)
    for _ in range(num_steps + 1):
        outputs = iter(
            llm.generate(
                [search.prompt + tokens for search in searches for _, tokens in search.beams],
                params,
                use_tqdm=False,
            )
        )
        for search in searches:
            candidates = [next(outputs).outputs[0].logprobs or [] for _ in search.beams]
            search.extend(width, eos_token_ids, [positions[0] for positions in candidates])
    return [search.parents[1:] for search in searches]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m bench.capacity.beams", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=320, help="tokens of each beam")
    parser.add_argument("--output", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    record = {}
    with LLM(options.model, max_num_seqs=128, max_num_batched_tokens=1024) as llm:
        for width in WIDTHS:
            parents = record_parents(llm, PROMPTS, width, options.steps)
            record[str(width)] = [
                " ".join("".join(map(str, step)) for step in prompt) for prompt in parents
            ]
            print(f"width {width} is done", file=sys.stderr)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": options.model, "prompts": PROMPTS, "parents": record}, indent=1)
    options.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
