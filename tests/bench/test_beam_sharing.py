"""Blocks that beams hold, against those that they would hold without sharing."""

from __future__ import annotations

import pytest

from bench.beam_sharing import BlockSteps, counting_engine, main, pieces, search
from rawpaged.weights.checkpoint import open_checkpoint
from tests.tiny import LLAMA

BLOCK_SIZE = 16
PROMPT = [(7 * i) % 320 for i in range(60)]
OUTPUT_LEN = 60


@pytest.mark.parametrize("width", [2, 4, 6, 8])
def test_beams_hold_their_prompt_once_and_what_they_have_in_common(width: int) -> None:
    engine, runner = counting_engine(
        open_checkpoint(LLAMA), num_blocks=80, block_size=BLOCK_SIZE, width=width
    )
    search(engine, PROMPT, width=width, output_len=OUTPUT_LEN)
    engine.close()
    steps = runner.steps
    # One step computes the prompt, and then each a token of every beam, but for the last token.
    lengths = range(len(PROMPT) + 1, len(PROMPT) + OUTPUT_LEN)
    of_the_prompt = -(-len(PROMPT) // BLOCK_SIZE)
    each = sum(-(-length // BLOCK_SIZE) for length in lengths)
    assert steps.referred == of_the_prompt + width * each
    shared_prompt = (width - 1) * (len(PROMPT) // BLOCK_SIZE) * len(lengths)
    assert steps.used < steps.referred - shared_prompt
    # And not less than one beam needs alone, with a block of its own for each other beam's end.
    own_ends = (width - 1) * len(lengths)
    assert steps.used >= of_the_prompt + each + own_ends - width


def test_blocks_are_counted_once_a_step() -> None:
    steps = BlockSteps()
    steps.add([[1, 2], [1, 3]])
    steps.add([[1, 2, 4]])
    assert (steps.used, steps.referred, steps.most_used) == (6, 7, 3)
    assert steps.saved == pytest.approx(1 / 7)


def test_pieces_of_a_text() -> None:
    assert pieces(range(10), 4, 3) == [range(0, 4), range(2, 6), range(4, 8)]
    with pytest.raises(ValueError, match="longer than the text"):
        pieces(range(10), 11, 1)


@pytest.mark.parametrize(
    "given",
    [["--width", "2", "0"], ["--num-prompts", "0"], ["--prompt-len", "-1"], ["--block-size", "0"]],
)
def test_what_is_less_than_one_is_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert "must be at least 1" in capsys.readouterr().err
