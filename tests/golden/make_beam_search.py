"""Writes beam_search.json: beam searches of transformers over the built-in and two tiny models.

    python make_beam_search.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --output beam_search.json

Needs transformers, torch and gguf, which neither the project nor its tests need. One thread
computes for some minutes. A search one of whose choices was nearer than `MARGIN` is left out:
there another order of summation may choose otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
WIDTHS = (2, 4, 8)
Rule = tuple[float, bool | str]
"""length_penalty and early_stopping."""
RULES: tuple[Rule, ...] = tuple(
    (penalty, kind) for penalty in (1.0, 0.0, 2.0, -1.0) for kind in (False, True, "never")
)
MARGIN = 1e-4
LARGE = -1e8
"""Scores below are transformers' stand-ins for "never"."""
SMOLLM2_MAX_TOKENS = 24
SMOLLM2_STOPS = {"none": [2], "sentence": [2, 30], "line": [2, 198, 30]}
"""<|im_end|>; a full stop; a line feed."""
TINY = ("llama", "qwen2")
TINY_MAX_TOKENS = 16


class Margins:
    """The smallest difference between two scores that decided anything in a search."""

    def __init__(self, model: Any) -> None:
        self.smallest = math.inf
        self._inner = {
            name: getattr(model, name)
            for name in (
                "_get_running_beams_for_next_iteration",
                "_update_finished_beams",
                "_check_early_stop_heuristic",
            )
        }
        model._get_running_beams_for_next_iteration = self._running
        model._update_finished_beams = self._finished
        model._check_early_stop_heuristic = self._stop

    def _running(self, **given: Any) -> Any:
        width, stops = given["num_beams"], given["next_token_hits_stopping_criteria"][0]
        scores = given["topk_log_probs"][0]
        going = scores[~stops]
        if len(going) > width:
            self._note(going[width - 1], going[width])
        if stops[width - 1] or stops[width]:  # whether it is among the best `width` matters
            self._note(scores[width - 1], scores[width])
        return self._inner["_get_running_beams_for_next_iteration"](**given)

    def _finished(self, **given: Any) -> Any:
        result = self._inner["_update_finished_beams"](**given)
        for better, worse in itertools.pairwise(result[1][0]):
            self._note(better, worse)
        return result

    def _stop(self, **given: Any) -> Any:
        if bool(given["is_sent_finished"].all()) and given["early_stopping"] is not True:
            length = given["cur_len"] - given["decoder_prompt_len"]
            if given["early_stopping"] == "never" and given["length_penalty"] > 0.0:
                length = given["max_length"] - given["decoder_prompt_len"]
            best = given["running_beam_scores"][0, 0] / length ** given["length_penalty"]
            self._note(best, given["beam_scores"][0].min())
        return self._inner["_check_early_stop_heuristic"](**given)

    def _note(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a > LARGE and b > LARGE:
            self.smallest = min(self.smallest, abs(float(a - b)))


def search(model: Any, margins: Margins, case: dict[str, Any]) -> dict[str, Any] | None:
    """The case with its beams, best first; None if one of its choices was too near."""
    margins.smallest = math.inf
    prompt, width = case["prompt_ids"], case["width"]
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=case["max_tokens"],
        min_new_tokens=case["min_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=case["stop_token_ids"],
        pad_token_id=model.config.vocab_size - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    print(case["model"], len(prompt), width, f"{margins.smallest:.6f}", flush=True)
    if margins.smallest < MARGIN:
        return None
    beams = []
    for ids, score in zip(result.sequences.tolist(), result.sequences_scores, strict=True):
        new = ids[len(prompt) :]
        ends = [i + 1 for i, token_id in enumerate(new) if token_id in case["stop_token_ids"]]
        end = next((end for end in ends if end > case["min_tokens"]), len(new))
        beams.append({"token_ids": new[:end], "score": round(float(score), 6)})
    return {**case, "margin": round(margins.smallest, 6), "beams": beams}


def smollm2_cases() -> Iterator[dict[str, Any]]:
    """Ten prompts of smollm2-135m.json, each at every width, under rules that take turns."""
    oracle = json.loads((HERE / "smollm2-135m.json").read_text())
    prompts = [case["prompt_ids"] for case in (*oracle["completions"][:7], *oracle["chats"])]
    rules, stops = itertools.cycle(RULES), itertools.cycle(SMOLLM2_STOPS.values())
    for prompt in prompts:
        stop_token_ids = next(stops)
        for width in WIDTHS:
            yield _case("smollm2-135m", prompt, width, stop_token_ids, next(rules))


def tiny_cases(name: str, model: Any) -> Iterator[dict[str, Any]]:
    """Three prompts under every rule; stop tokens are those that the best beams hold most."""
    ids = [int(i) for i in torch.randint(3, model.config.vocab_size, (60,))]
    widths = itertools.cycle(WIDTHS)
    for number, prompt in enumerate((ids[:5], ids[5:25], ids[25:])):
        beams = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            do_sample=False,
            num_beams=8,
            num_return_sequences=8,
            max_new_tokens=TINY_MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=model.config.vocab_size - 1,
        )[:, len(prompt) :].tolist()
        counts = Counter(token_id for beam in beams for token_id in beam)
        stops = sorted(token_id for token_id, _ in counts.most_common(number + 2))
        for rule in RULES:
            yield _case(name, prompt, next(widths), stops, rule, 5 * (number == 2))
        next(widths)


def _case(
    name: str,
    prompt: list[int],
    width: int,
    stop_token_ids: list[int],
    rule: Rule,
    min_tokens: int = 0,
) -> dict[str, Any]:
    return {
        "model": name,
        "prompt_ids": prompt,
        "width": width,
        "max_tokens": SMOLLM2_MAX_TOKENS if name not in TINY else TINY_MAX_TOKENS,
        "min_tokens": min_tokens,
        "stop_token_ids": stop_token_ids,
        "length_penalty": rule[0],
        "early_stopping": rule[1],
    }


def load(directory: Path, **options: Any) -> Any:
    """A causal model in float32 with eager attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True, help="the built-in model's file")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = []
    for name in TINY:
        model = load(HERE / "tiny" / name)
        cases = list(tiny_cases(name, model))
        margins = Margins(model)
        results += [search(model, margins, case) for case in cases]
    model = load(args.gguf.parent, gguf_file=args.gguf.name)
    margins = Margins(model)
    results += [search(model, margins, case) for case in smollm2_cases()]
    kept = [json.dumps(result) for result in results if result is not None]
    print(f"{len(results) - len(kept)} of {len(results)} cases left out")
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__} on CPU"
    args.output.write_text(
        f'{{"made_with": {json.dumps(made_with)}, "cases": [\n' + ",\n".join(kept) + "\n]}\n"
    )


if __name__ == "__main__":
    main()
