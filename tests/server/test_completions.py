from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rawpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.server.client import complete
from tests.server.conftest import Server, serve
from tests.server.fake_engine import BOS, FakeEngine

# The fake engine repeats the prompt, here the begin-of-sequence token and five letters.
HELLO = [BOS, *b"hello"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def last_params(server: Server) -> SamplingParams:
    return server.engine.calls[-1][1]


def test_plain(client: openai.OpenAI, server: Server) -> None:
    completion = client.completions.create(model="fake", prompt="hello", max_tokens=8)
    assert completion.object == "text_completion"
    assert completion.id.startswith("cmpl-")
    assert completion.model == "fake"
    [choice] = completion.choices
    assert (choice.index, choice.text) == (0, "helloh")
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    usage = completion.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 8, 14)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert last_params(server).output_kind is RequestOutputKind.FINAL_ONLY


def test_default_max_tokens_is_16(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="fake", prompt="hello")
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="fake", prompt=["a" * 20, "b" * 40])
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 21 + 41
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 16 + 32


def test_stream_equals_plain(client: openai.OpenAI, server: Server) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": ["hello", "wörld"], "n": 2}
    plain = client.completions.create(**options)
    texts = [""] * 4
    reasons: list[Any] = [None] * 4
    for chunk in client.completions.create(**options, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert last_params(server).output_kind is RequestOutputKind.DELTA
    # The letter of two bytes comes as two replacement characters from the fake's deltas.
    assert texts[:2] == [choice.text for choice in plain.choices[:2]]
    assert reasons == ["length"] * 4
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]


def test_stream_usage(server: Server) -> None:
    events = complete(
        server.url, max_tokens=2, n=2, stream=True, stream_options={"include_usage": True}
    ).events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(events) == 6
    assert all(event["usage"] is None for event in events[:-2])
    assert len({event["id"] for event in events[:-1]}) == 1


def test_continuous_usage(server: Server) -> None:
    events = complete(
        server.url, max_tokens=3, stream=True, stream_options={"continuous_usage_stats": True}
    ).events
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [HELLO]),
        (["hello", "x"], [HELLO, [BOS, 120]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_shapes(server: Server, prompt: Any, expected: list[list[int]]) -> None:
    server.engine.calls.clear()
    answer = complete(server.url, prompt=prompt, max_tokens=1).json
    assert [ids for ids, _ in server.engine.calls] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


def test_add_special_tokens(server: Server) -> None:
    complete(server.url, add_special_tokens=False)
    assert server.engine.calls[-1][0] == HELLO[1:]


def test_every_sampling_parameter_reaches_the_engine(server: Server) -> None:
    wanted: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": 11,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 5,
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }
    assert complete(server.url, **wanted, logit_bias={"65": 2.5}).status == 200
    params = last_params(server)
    wanted |= {"stop": ("a", "b"), "stop_token_ids": (3, 4), "logit_bias": {65: 2.5}}
    assert {name: getattr(params, name) for name in wanted} == wanted


def test_null_stands_for_the_default(server: Server) -> None:
    from rawpaged.server.protocol import CompletionRequest

    required_or_bool = {"prompt", "model", "return_token_ids", "return_tokens_as_token_ids"}
    nulls = dict.fromkeys(set(CompletionRequest.__struct_fields__) - required_or_bool)
    assert complete(server.url, **nulls).status == 200
    assert last_params(server) == SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


def test_neutral_values_of_other_fields_pass(server: Server) -> None:
    from rawpaged.server.protocol import NEUTRAL_VALUES

    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            assert complete(server.url, **{name: value}).status == 200, name


def test_logprobs(server: Server) -> None:
    [choice] = complete(server.url, prompt="ab", max_tokens=3, logprobs=2).json["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 3, 4],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "tokens": ["<s>", "a", "b"],
        "top_logprobs": [
            {"<s>": -1.0, "\0": -0.5},
            {"a": -1.0, "b": -0.5},
            {"b": -1.0, "c": -0.5},
        ],
    }


def test_minus_infinity_is_a_number_on_the_wire(server: Server) -> None:
    [choice] = complete(server.url, prompt=[65], max_tokens=1, logprobs=6).json["choices"]
    assert min(choice["logprobs"]["top_logprobs"][0].values()) == -9999.0


def test_tokens_as_ids(server: Server) -> None:
    [choice] = complete(
        server.url, prompt="ab", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True
    ).json["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:256", "token_id:97"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["token_id:97", "token_id:98"]


def test_lm_evaluation_harness_request(server: Server) -> None:
    """Its scoring: token-id lists, one token more, logprobs of prompt and that token."""
    answer = complete(
        server.url,
        prompt=[[65, 66, 67], [70, 71]],
        max_tokens=1,
        logprobs=1,
        echo=True,
        temperature=0,
        seed=1234,
    ).json
    first, second = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert first["text"] == "ABCA"
    assert first["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -1.0, -1.0, -1.0],
        "tokens": ["A", "B", "C", "A"],
        "top_logprobs": [
            None,
            {"B": -1.0, "C": -0.5},
            {"C": -1.0, "D": -0.5},
            {"A": -1.0, "B": -0.5},
        ],
    }
    assert second["text"] == "FGF"
    assert len(second["logprobs"]["token_logprobs"]) == 3


def test_echo_without_logprobs(server: Server) -> None:
    [choice] = complete(server.url, echo=True, max_tokens=2).json["choices"]
    assert choice["text"] == "helloh"
    assert choice["logprobs"] is None
    assert last_params(server).prompt_logprobs is None


def test_echo_of_zero_tokens_scores_the_prompt(server: Server) -> None:
    answer = complete(server.url, echo=True, max_tokens=0, logprobs=0, return_token_ids=True).json
    [choice] = answer["choices"]
    assert choice["text"] == "hello"
    assert choice["logprobs"]["tokens"] == ["<s>", *"hello"]
    assert choice["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    assert complete(server.url, max_tokens=0).error["param"] == "max_tokens"


def test_streamed_logprobs_join_to_the_plain_ones(server: Server) -> None:
    options: dict[str, Any] = {"prompt": "abc", "logprobs": 2, "echo": True, "n": 2}
    plain = complete(server.url, **options).json["choices"]
    for choice in plain:
        joined: dict[str, list[Any]] = {}
        text = ""
        for event in complete(server.url, **options, stream=True).events[:-1]:
            [news] = event["choices"]
            if news["index"] == choice["index"]:
                text += news["text"]
                for name, values in news["logprobs"].items():
                    joined.setdefault(name, []).extend(values)
        assert text == choice["text"]
        assert joined == choice["logprobs"]


def test_token_ids_and_prompt_logprobs(server: Server) -> None:
    [choice] = complete(
        server.url, prompt=[5, 6], max_tokens=2, return_token_ids=True, prompt_logprobs=1
    ).json["choices"]
    assert choice["prompt_token_ids"] == [5, 6]
    assert choice["token_ids"] == [5, 6]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": "\x06"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "\x07"},
        },
    ]


def test_streamed_token_ids(server: Server) -> None:
    events = complete(
        server.url, prompt=[5, 6], max_tokens=2, return_token_ids=True, stream=True
    ).events
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["token_ids"] for choice in choices] == [[5], [6]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6], None]


def test_without_tokenizer_only_token_ids() -> None:
    with serve(FakeEngine(has_tokenizer=False)) as server:
        assert complete(server.url).error["param"] == "prompt"
        [choice] = complete(
            server.url, prompt=[65], max_tokens=1, logprobs=1, echo=True, return_token_ids=True
        ).json["choices"]
        assert choice["token_ids"] == [65]


def test_long_text_is_tokenized_in_a_thread() -> None:
    with serve(FakeEngine(max_model_len=20_000)) as server:
        answer = complete(server.url, prompt="a" * 10_000, max_tokens=1)
        assert answer.json["usage"]["prompt_tokens"] == 10_001


def test_failure_in_a_batch_ends_the_whole_request() -> None:
    from rawpaged.errors import RequestFailedError

    engine = FakeEngine(delay=0.01)
    engine.failure = RequestFailedError("no more blocks")
    engine.fail_after = 2
    with serve(engine) as server:
        answer = complete(server.url, prompt=[[1], [2], [3]], max_tokens=100)
        assert answer.status == 500
        assert answer.error["message"] == "no more blocks"
        assert not engine.live


def test_failure_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine()
    engine.failure = ValueError("internal detail")
    engine.fail_after = 2
    with serve(engine) as server:
        events = complete(server.url, max_tokens=5, stream=True).events
        assert [list(event) == ["error"] for event in events] == [False, False, True]
        assert events[-1]["error"]["message"] == "internal server error"
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError),
        ):
            list(client.completions.create(model="fake", prompt="a", stream=True))


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(server: Server) -> None:
    calls = len(server.engine.calls)
    answer = complete(server.url, prompt="x" * (4 * 256 + 1))
    assert answer.status == 400
    assert answer.error["param"] == "prompt"
    assert "1025 characters" in answer.error["message"]
    assert len(server.engine.calls) == calls


def test_best_of(server: Server) -> None:
    answer = complete(server.url, n=2, best_of=5)
    assert answer.status == 200
    assert len(answer.json["choices"]) == 2
    params = last_params(server)
    assert (params.n, params.best_of, params.num_samples) == (2, 5, 5)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "best_of": 2},
        {"best_of": 2, "stream": True},
        {"best_of": 2, "use_beam_search": True},
        {"best_of": 128, "prompt": ["a"] * 17},
    ],
)
def test_best_of_what_cannot_be(server: Server, fields: dict[str, Any]) -> None:
    answer = complete(server.url, **fields)
    assert answer.status == 400
    assert answer.error["param"] == "best_of"
    assert complete(server.url, n=2, best_of=2, stream=True).status == 200
