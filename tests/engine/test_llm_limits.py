"""What cannot be honoured is refused by name, before anything is queued or loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine import loading
from rawpaged.engine.engine_thread import EngineThread
from rawpaged.errors import BackendError, ConfigError, InvalidRequestError, RawpagedError
from tests.tiny import LLAMA, VOCAB_SIZE, tiny_config

NAN, INFINITY = float("nan"), float("inf")

WRONG_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 129, 1.5, "2", None, True],
    "temperature": [-0.1, 100.5, NAN, INFINITY, "1", None, True],
    "top_p": [0.0, -1.0, 1.1, NAN, "1", None],
    "top_k": [-2, 2**31, 1.5, None],
    "min_p": [-0.1, 1.1, NAN, None],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN, None],
    "repetition_penalty": [0.0, -1.0, NAN, INFINITY, None],
    "logit_bias": [{1: 101.0}, {1: NAN}, {1: "x"}, {1: None}, [1], "x"],
    "best_of": [0, -1, 129, 1.5, "2", True],
    "seed": [2**64, -(2**63) - 1, 1.5, "1", True],
    "stop": ["", [""], ["a"] * 33, [1], 5, {"a"}],
    "stop_token_ids": [5, {5}],
    "include_stop_str_in_output": [None, 1, "yes"],
    "ignore_eos": [None, 1, "yes"],
    "skip_special_tokens": [None, 0],
    "skip_reading_prefix_cache": [None, 1, "yes"],
    "cache_salt": ["", "a" * 1025, 5, ("a",)],
    "priority": [2**63, -(2**63) - 1, 1.5, "1", None, True],
    "max_tokens": [0, -1, 1.5, "1", True],
    "min_tokens": [-1, 17, 1.5, None],
    "logprobs": [-1, 1.5, "1", True],
    "prompt_logprobs": [-1, 1.5, True],
    "output_kind": [None, 2, "DELTA"],
    "use_beam_search": [None, 1, "yes"],
    "length_penalty": [-10.1, 10.1, NAN, None, True, 2.0],
    "early_stopping": [None, 0, 1.0, "always", True],
}
WRONG_FOR_THE_MODEL: list[tuple[str, dict[str, Any]]] = [
    ("logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {"5": 1.0}}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [1.5]}),
    ("logprobs", {"logprobs": VOCAB_SIZE + 1}),
    ("prompt_logprobs", {"prompt_logprobs": VOCAB_SIZE + 1}),
    ("priority", {"priority": 1}),
    ("max_tokens", {"max_tokens": 254}),
    ("min_tokens", {"max_tokens": None, "min_tokens": 254}),
]
WRONG_PROMPTS: list[Any] = [
    "", [], [VOCAB_SIZE], [-1], [1.5], ["a"], [None], [True], [1] * 256, "the " * 400, None, 5, {1},
]  # fmt: skip
WRONG_FLAGS: list[tuple[str, Any]] = [
    ("device", "cuda"),
    ("device", None),
    ("dtype", "float16"),
    ("dtype", 16),
    ("load_format", "gguf"),
    ("max_model_len", 0),
    ("max_model_len", -5),
    ("max_model_len", 513),
    ("max_model_len", "256"),
    ("max_model_len", 256.0),
    ("block_size", 0),
    ("block_size", None),
    ("num_gpu_blocks_override", 0),
    ("num_gpu_blocks_override", 1.5),
    ("kv_cache_memory_bytes", -1),
    ("kv_cache_memory_bytes", 5e9),
    ("kv_cache_memory_bytes", 1000),
    ("max_num_seqs", 0),
    ("max_num_seqs", True),
    ("max_num_batched_tokens", 0),
    ("max_num_batched_tokens", "64"),
    ("enable_prefix_caching", "no"),
    ("enable_prefix_caching", None),
    ("scheduling_policy", "lifo"),
    ("scheduling_policy", None),
    ("watermark", 1.0),
    ("watermark", -0.1),
    ("watermark", NAN),
    ("watermark", "0.01"),
    ("max_logprobs", -1),
    ("max_logprobs", None),
    ("num_threads", 0),
    ("num_threads", 100000),
    ("num_threads", "4"),
    ("seed", -1),
    ("seed", 1.5),
    ("tokenizer", 5),
    ("chat_template", 5),
    ("chat_template", "{{ messages }}"),  # the checkpoint has no tokenizer
    ("revision", 5),
    ("model", ""),
    ("model", None),
]


@pytest.fixture
def refuse(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., InvalidRequestError]:
    """Generates for a good and a wrong request; the error, if nothing was queued."""
    monkeypatch.delattr(EngineThread, "submit")

    def generate(prompt: Any = "the", **params: Any) -> InvalidRequestError:
        good = SamplingParams()
        with pytest.raises(InvalidRequestError) as info:
            llm.generate(["good", prompt], [good, SamplingParams(**params)], use_tqdm=False)
        return info.value

    return generate


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_VALUES.items() for value in values]
)
def test_wrong_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as info:
        SamplingParams(**{name: value})
    assert info.value.param == name
    assert name in str(info.value)


def test_every_field_has_a_wrong_value() -> None:
    assert set(WRONG_VALUES) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(("name", "params"), WRONG_FOR_THE_MODEL, ids=str)
def test_wrong_for_the_model(
    refuse: Callable[..., InvalidRequestError], name: str, params: dict[str, Any]
) -> None:
    error = refuse([1, 2, 3], **params)
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=lambda prompt: repr(prompt)[:20])
def test_wrong_prompt(refuse: Callable[..., InvalidRequestError], prompt: Any) -> None:
    error = refuse(prompt)
    assert error.param == "prompt"
    assert "prompt" in str(error)


def test_text_needs_a_tokenizer() -> None:
    with LLM(tiny_config()) as llm:
        with pytest.raises(InvalidRequestError, match="no tokenizer") as info:
            llm.generate("text", use_tqdm=False)
        assert info.value.param == "prompt"
        with pytest.raises(InvalidRequestError, match="needs a tokenizer") as info:
            llm.generate([1], SamplingParams(stop="a"), use_tqdm=False)
        assert info.value.param == "stop"
        (output,) = llm.generate([1], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.outputs[0].text == ""


@pytest.mark.parametrize(("name", "value"), WRONG_FLAGS, ids=str)
def test_wrong_flag(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loading, "load_weights")
    flags = {"model": LLAMA, "num_threads": 1, name: value}
    with pytest.raises(ConfigError, match=name):
        LLM(**flags)


def test_unknown_flag() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is no argument .*, num_threads"):
        LLM(LLAMA, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM(tiny_config(), max_num_seq=2)


@pytest.mark.parametrize(
    "flags",
    [
        {"block_size": 8},
        {"block_size": 24},
        {"num_gpu_blocks_override": 2 * 10**9},
        {"kv_cache_memory_bytes": 10**15},
        {"max_num_seqs": 10**12, "num_gpu_blocks_override": 16},
        {"max_num_seqs": 10**12},
    ],
    ids=str,
)
def test_what_the_machine_cannot_do(flags: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loading, "load_weights")
    with pytest.raises(BackendError):
        LLM(LLAMA, num_threads=1, **flags)


def test_flags_over_a_config() -> None:
    config = tiny_config()
    with LLM(config, max_model_len=32) as llm:
        assert (llm.config.max_model_len, config.max_model_len) == (32, 256)
    with pytest.raises(RawpagedError, match="block_size"):
        LLM(config, block_size=-1)


def test_too_many_biases_and_stops() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias holds 1025 tokens, the limit"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(InvalidRequestError, match="stop_token_ids holds 1025 ids, the limit"):
        SamplingParams(stop_token_ids=range(1025))


@pytest.mark.parametrize(("budget", "is_told"), [(3, True), (4, False)])
def test_budgets_too_small_for_all_are_told_of(
    budget: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_config(max_num_batched_tokens=budget, max_num_seqs=4)) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate([[1, 2]] * 4, params, use_tqdm=False)) == 4
    assert ("max_num_batched_tokens=3 is less than max_num_seqs=4" in caplog.text) == is_told
