"""How many KV blocks beam search holds, and how many it would hold if beams shared none.

    python -m bench.beam_sharing --width 2 4 6 8 --prompt-len 19 161 --output-len 58

Prompts are pieces of a fixed text, one search after another. A step counts once for each block
that is held in it, so the share saved is an average over the time that a search takes: as in the
PagedAttention paper (arXiv 2309.06180, figure 15), blocks saved by blocks without sharing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.perplexity import DEFAULT_TEXT
from rawpaged.config import SchedulerConfig
from rawpaged.devices import open_backend
from rawpaged.engine.engine import Engine
from rawpaged.engine.launched_step import LaunchedStep
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.request import Request, RequestGroup
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.output import SchedulerOutput
from rawpaged.tokenization.gguf_tokenizer import load_tokenizer_from_gguf
from rawpaged.weights.checkpoint import Checkpoint, open_checkpoint
from rawpaged.weights.loader import load_weights


@dataclass(slots=True)
class BlockSteps:
    """Blocks in the block tables of steps, summed over the steps."""

    used: int = 0
    """Each block once a step."""
    referred: int = 0
    """As often as it is in a block table: so many blocks there would be without sharing."""
    most_used: int = 0

    def add(self, block_tables: Sequence[Sequence[int]]) -> None:
        used = len({block_id for table in block_tables for block_id in table})
        self.used += used
        self.referred += sum(len(table) for table in block_tables)
        self.most_used = max(self.most_used, used)

    @property
    def saved(self) -> float:
        """Share of the blocks without sharing that sharing saves."""
        return 1.0 - self.used / self.referred


class CountingRunner(ModelRunner):
    """Counts the blocks of each step that it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = BlockSteps()

    def launch_forward(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> LaunchedStep:
        self.steps.add([request.block_table for request in output.scheduled])
        return super().launch_forward(output, requests)


def counting_engine(
    checkpoint: Checkpoint, *, num_blocks: int, block_size: int, width: int
) -> tuple[Engine, CountingRunner]:
    """An engine on the CPU for one search at a time, without a prefix cache."""
    limits = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=num_blocks * block_size,
        max_num_seqs=width,
        max_num_batched_tokens=max(64, width),
        enable_prefix_caching=False,
    )
    backend = open_backend("cpu", dtype="bfloat16", num_threads=None)
    runner = CountingRunner(
        checkpoint.model_config,
        load_weights(checkpoint, backend, progress=False),
        backend,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=width,
        max_model_len=limits.max_model_len,
    )
    return Engine(limits, runner), runner


def search(engine: Engine, prompt: Sequence[int], *, width: int, output_len: int) -> None:
    """One beam search that no token ends before `output_len`."""
    params = SamplingParams(use_beam_search=True, n=width, ignore_eos=True)
    beams = [
        Request(str(index), prompt, params, max_tokens=output_len, sample_index=index)
        for index in range(width)
    ]
    engine.add_group(RequestGroup(beams, lockstep=True))
    while engine.has_unfinished():
        engine.step()


def pieces(token_ids: Sequence[int], length: int, count: int) -> list[Sequence[int]]:
    """`count` prompts at equal distances in a text; raises ValueError if it is too short."""
    if length > len(token_ids):
        raise ValueError(f"a prompt of {length} tokens is longer than the text, {len(token_ids)}")
    starts = [i * (len(token_ids) - length) // count for i in range(count)]
    return [token_ids[start : start + length] for start in starts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[19, 161])
    parser.add_argument("--output-len", type=int, default=58)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    checkpoint = open_checkpoint("smollm2-135m")
    assert checkpoint.gguf_metadata is not None
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    token_ids = load_tokenizer_from_gguf(checkpoint.gguf_metadata).encode(text)
    blocks_of_one = -(-(max(args.prompt_len) + args.output_len) // args.block_size)
    engine, runner = counting_engine(
        checkpoint,
        num_blocks=max(args.width) * blocks_of_one,
        block_size=args.block_size,
        width=max(args.width),
    )
    print("| prompt + output | width | most blocks | saved by sharing |\n|---|---|---|---|")
    for length, width in itertools.product(args.prompt_len, args.width):
        runner.steps = BlockSteps()
        for prompt in pieces(token_ids, length, args.num_prompts):
            search(engine, prompt, width=width, output_len=args.output_len)
        steps, lengths = runner.steps, f"{length} + {args.output_len}"
        print(
            f"| {lengths} | {width} | {steps.most_used} | {100 * steps.saved:.1f} % |", flush=True
        )
    engine.close()


if __name__ == "__main__":
    main()
