"""Profiles of a running engine: exact steps, ranges that nest, and the same results as without."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rawpaged import LLM, AsyncEngine, SamplingParams
from rawpaged.backend import Backend
from rawpaged.engine.engine import Engine
from rawpaged.engine.engine_output import EngineOutput
from rawpaged.engine.profile_report import describe_profile
from rawpaged.engine.profiling import Profile, ProfileOptions, Profiler
from rawpaged.engine.step_label import step_args, step_label
from rawpaged.engine.traced_backend import TracedBackend
from rawpaged.errors import EngineClosedError, ProfileError, RequestFailedError, TraceFileError
from rawpaged.request import Request
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput
from rawpaged.tracing import Range, RangeRecorder, Tracer
from tests.engine.helpers import recorded_logits, request, run, tiny_engine
from tests.tiny import engine_of, tiny_config, wait_until

PHASES = ["schedule", "plan", "forward", "logits", "sample", "update", "detokenise"]
OPS = [
    "embed", "rms_norm", "add_rms_norm", "linear", "rope_and_store_kv", "copy_blocks",
    "paged_attention", "silu_and_mul", "gather_rows", "edit_logits", "sample", "token_logprobs",
    "upload", "download",
]  # fmt: skip


def generate(llm: LLM, max_tokens: int, **params: Any) -> None:
    """One request: its prompt fits one step, and each token is a step."""
    llm.generate(
        [[5, 6, 7]],
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **params),
        use_tqdm=False,
    )


def is_traced(engine: Engine) -> bool:
    """Whether ops are wrapped; fails if only some of the parts say so."""
    runner = engine.runner
    wrapped = {isinstance(ops, TracedBackend) for ops in (runner._ops, runner.model._ops)}
    wrapped |= {t.is_on for t in (engine.tracer, runner._tracer, runner.model._tracer)}
    assert len(wrapped) == 1
    return wrapped.pop()


def parents(ranges: list[Range]) -> list[int | None]:
    """Index of the range around each; fails if ranges cross, or siblings overlap."""
    found: list[int | None] = []
    around: list[int] = []
    for index, each in enumerate(ranges):
        assert each.start_ns <= each.end_ns
        while around and ranges[around[-1]].end_ns <= each.start_ns:
            around.pop()
        if around:
            assert each.end_ns <= ranges[around[-1]].end_ns
        found.append(around[-1] if around else None)
        around.append(index)
    return found


def profile_steps(llm: LLM, num_steps: int, path: Path | None = None) -> Profile:
    llm.start_profile(path, num_steps=num_steps)
    generate(llm, num_steps)
    return llm.stop_profile()


# Ranges


def test_ranges_nest(llm: LLM) -> None:
    profile = profile_steps(llm, 3)
    ranges = profile.ranges
    outer = parents(ranges)
    kinds = Counter(
        (each.kind, None if parent is None else ranges[parent].kind)
        for each, parent in zip(ranges, outer, strict=True)
    )
    num_layers = llm.model_config.num_layers
    assert kinds["step", None] == 3
    assert kinds["phase", "step"] == 3 * len(PHASES)
    assert kinds["layer", "phase"] == 3 * num_layers
    assert set(kinds) == {
        ("step", None),
        ("phase", "step"),
        ("layer", "phase"),
        ("op", "phase"),
        ("op", "layer"),
    }
    layers = [each.name for each in ranges if each.kind == "layer"]
    assert layers == [f"layer {i}" for i in range(num_layers)] * 3
    phases = [each.name for each in ranges if each.kind == "phase"]
    assert phases == PHASES * 3
    for index, each in enumerate(ranges):
        inside = [r.duration_ns for r, p in zip(ranges, outer, strict=True) if p == index]
        assert sum(inside) <= each.duration_ns


def test_names_tell_sizes(llm: LLM) -> None:
    ranges = profile_steps(llm, 2).ranges
    first, second = (each for each in ranges if each.kind == "step")
    assert first.name.endswith(" prefill=1x3 decode=0")
    assert second.name.endswith(" prefill=0 decode=1")
    assert second.args["max_context_len"] == 4
    config = llm.model_config
    names = [each.name for each in ranges if each.kind == "op"]
    per_layer = [f"linear 3x{config.hidden_size}x{2 * config.intermediate_size}"]
    per_layer += [f"paged_attention 3x{config.num_heads}x{config.head_dim}"]
    assert all(names.count(name) == config.num_layers for name in per_layer)
    assert names.count(f"linear 1x{config.hidden_size}x{config.vocab_size}") == 2


def test_the_file_holds_the_ranges(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profile = profile_steps(llm, 3, path)
    assert profile.path == path
    trace = json.loads(path.read_text())
    assert trace["otherData"]["device"] == "cpu"
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == [each.name for each in profile.ranges]
    read = [
        Range(
            event["cat"],
            event["name"],
            event["args"],
            round(event["ts"] * 1000),
            round(event["ts"] * 1000) + round(event["dur"] * 1000),
        )
        for event in events
    ]
    assert parents(read) == parents(profile.ranges)
    assert [each.duration_ns for each in read] == [each.duration_ns for each in profile.ranges]
    assert {event["tid"] for event in trace["traceEvents"]} != {threading.get_native_id()}


def test_every_op_of_the_seam_is_a_range() -> None:
    """Each is called once through the wrapper, which passes on what it got."""

    class Recorded:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: (name, args, kwargs)

    class Thing:
        """Stands for every array, weight and table."""

        shape = (2, 3)
        nbytes = in_features = out_features = block_size = 4
        rows: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 1

        @property
        def block_tables(self) -> Thing:
            return self

    recorder = RangeRecorder()
    traced = TracedBackend(Recorded(), Tracer([recorder]))  # type: ignore[arg-type]
    for op in OPS:
        parameters = list(inspect.signature(getattr(Backend, op)).parameters.values())[1:]
        args = [Thing() for each in parameters if each.kind is not each.KEYWORD_ONLY]
        kwargs = {each.name: Thing() for each in parameters if each.kind is each.KEYWORD_ONLY}
        result = getattr(traced, op)(*args, **kwargs)
        assert result in (None, (op, tuple(args), kwargs))
    assert [each.name.split()[0] for each in recorder.ranges()] == OPS
    rest = {
        "name", "dtype", "kv_cache_dtype", "activation_dtype", "empty", "pack_linear",
        "kv_bytes_per_block", "kv_magnitudes",
        "new_kv_cache", "new_host_kv_cache", "memory_info", "close", "start_profiler",
        "stop_profiler", "plan", "static_plans", "run_ahead", "capture", "prepare",
        "captures_on_demand",
        "offload_linear", "restore_linear", "linear_input",
        "release_unused", "bind_thread", "block_bits", "pack_quantized", "pages_ahead",
    }  # fmt: skip
    public = {name for name in vars(Backend) if not name.startswith("_")}
    assert public == rest | set(OPS)


# Steps


def test_exactly_the_steps_asked_for(llm: LLM) -> None:
    first = llm.start_profile(num_steps=1)
    generate(llm, 1)
    assert llm.stop_profile().first_step == first
    assert llm.start_profile(first_step=first + 4, num_steps=3) == first + 4
    generate(llm, 12)
    profile = llm.stop_profile()
    assert (profile.first_step, profile.num_steps) == (first + 4, 3)
    steps = [each.name.split()[0] for each in profile.ranges if each.kind == "step"]
    assert steps == [f"step={first + 4 + i}" for i in range(3)]
    # The profile's first step is the fourth after the prefill.
    assert [r.args["max_context_len"] for r in profile.ranges if r.kind == "step"] == [6, 7, 8]


def test_until_stopped(llm: LLM) -> None:
    llm.start_profile()
    generate(llm, 3)
    generate(llm, 2)
    assert llm.stop_profile().num_steps == 5


def test_refused(llm: LLM) -> None:
    with pytest.raises(ProfileError, match="no profile"):
        llm.stop_profile()
    generate(llm, 1)
    with pytest.raises(ProfileError, match="first_step=1 is over"):
        llm.start_profile(first_step=1)
    for name in ("first_step", "num_steps"):
        with pytest.raises(ProfileError, match=f"{name}=0"):
            llm.start_profile(**{name: 0})  # type: ignore[arg-type]
    llm.start_profile()
    with pytest.raises(ProfileError, match="running"):
        llm.start_profile()
    assert llm.stop_profile().num_steps == 0
    with pytest.raises(ProfileError, match="no profile"):
        llm.stop_profile()


def test_one_that_ended_is_replaced_by_the_next(llm: LLM) -> None:
    llm.start_profile(num_steps=1)
    generate(llm, 3)
    second = llm.start_profile()
    assert llm.stop_profile().first_step == second


def test_stopped_before_its_first_step(llm: LLM, tmp_path: Path) -> None:
    first = llm.start_profile(tmp_path / "trace.json", first_step=10**6)
    generate(llm, 2)
    profile = llm.stop_profile()
    assert (profile.first_step, profile.num_steps, profile.ranges) == (first, 0, [])
    assert profile.path is None
    assert not list(tmp_path.iterdir())


def test_a_full_profile_ends_by_itself() -> None:
    engine = tiny_engine()
    profiler = Profiler(engine, max_ranges=100)
    ended: list[bool] = []
    profiler.start(ProfileOptions(on_end=lambda: ended.append(True)))
    engine.add_group(request("a", [3, 4, 5], max_tokens=30).group)
    while engine.has_unfinished():
        with profiler.step():
            engine.step()
    profile = profiler.stop()
    engine.close()
    assert profile.is_truncated
    assert ended == [True]
    assert 1 < profile.num_steps < 30
    assert 100 <= len(profile.ranges) < 200
    assert "ended early" in describe_profile(profile)


# Nothing is left behind, nothing changes


def test_wrappers_are_there_only_meanwhile(llm: LLM) -> None:
    engine = engine_of(llm)
    assert not is_traced(engine)
    assert engine.runner._ops is engine.runner.backend
    llm.start_profile()
    assert not is_traced(engine)
    generate(llm, 1)
    assert is_traced(engine)
    llm.stop_profile()
    assert not is_traced(engine)
    assert engine.runner._ops is engine.runner.model._ops is engine.runner.backend


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_sw"])
def test_results_are_the_same_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def requests() -> list[Request]:
        rng = random.Random(4)
        return [
            request(
                str(i),
                [rng.randrange(3, 320) for _ in range(rng.randint(1, 40))],
                max_tokens=12,
                temperature=float(i % 2),
                seed=i,
                frequency_penalty=0.1 if i == 2 else 0.0,
                logprobs=2 if i == 3 else None,
                prompt_logprobs=1 if i == 4 else None,
            )
            for i in range(6)
        ]

    plain = tiny_engine(name, max_num_batched_tokens=32)
    expected = run(plain, requests())
    traced = tiny_engine(name, max_num_batched_tokens=32)
    profiler, untraced_step = Profiler(traced), traced.step

    def step() -> list[EngineOutput]:
        with profiler.step():
            return untraced_step()

    monkeypatch.setattr(traced, "step", step)
    profiler.start(ProfileOptions())
    assert run(traced, requests()) == expected
    assert recorded_logits(traced) == recorded_logits(plain)
    ops = {each.name.split()[0] for each in profiler.stop().ranges if each.kind == "op"}
    assert ops == set(OPS) - {"download", "copy_blocks"}
    plain.close()
    traced.close()


# What goes wrong


def test_a_failing_step_is_traced_to_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FloatingPointError("planted")

    llm.start_profile()
    monkeypatch.setattr(engine_of(llm).runner.backend, "silu_and_mul", fail)
    with pytest.raises(RequestFailedError, match="planted"):
        generate(llm, 2)
    monkeypatch.undo()
    generate(llm, 2)
    profile = llm.stop_profile()
    assert profile.num_steps == 3
    parents(profile.ranges)
    assert not is_traced(engine_of(llm))


def test_a_file_that_cannot_be_written(llm: LLM, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "trace.json", tmp_path):
        llm.start_profile(path, num_steps=1)
        generate(llm, 2)
        with pytest.raises(TraceFileError, match="could not be written"):
            llm.stop_profile()
    generate(llm, 1)
    with pytest.raises(ProfileError, match="no profile"):
        llm.stop_profile()


def test_closing_writes_the_file(tmp_path: Path) -> None:
    with LLM(tiny_config()) as llm:
        llm.start_profile(tmp_path / "trace.json")
        generate(llm, 2)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in events) == 2
    with pytest.raises(EngineClosedError):
        llm.start_profile()
    with pytest.raises(EngineClosedError):
        llm.stop_profile()


def test_a_dying_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace is written, and calls that came too late are refused."""
    with LLM(tiny_config()) as llm:
        llm.start_profile(tmp_path / "trace.json")
        generate(llm, 1)
        engine = engine_of(llm)
        late: list[Any] = []

        def die() -> Any:
            late.append(llm._thread.stop_profile())
            raise MemoryError("planted")

        monkeypatch.setattr(engine, "step", die)
        with pytest.raises(RequestFailedError):
            generate(llm, 1)
        with pytest.raises(EngineClosedError):
            late[0].result(5)
        wait_until(lambda: (tmp_path / "trace.json").exists())


def test_async(async_engine: AsyncEngine, tmp_path: Path) -> None:
    async def main() -> Profile:
        with pytest.raises(ProfileError):
            await async_engine.stop_profile()
        await async_engine.start_profile(tmp_path / "trace.json", num_steps=2)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        async for _ in async_engine.generate([5, 6, 7], params):
            pass
        return await async_engine.stop_profile()

    profile = asyncio.run(main())
    assert profile.num_steps == 2
    assert profile.path is not None
    assert profile.path.exists()


# Labels and tables


def scheduled(*chunks: tuple[int, int, int]) -> tuple[SchedulerOutput, dict[str, Request]]:
    """A step of (prompt length, start, tokens) chunks."""
    items, requests = [], {}
    for index, (prompt_len, start, length) in enumerate(chunks):
        name = str(index)
        requests[name] = request(name, [1] * prompt_len)
        requests[name].token_ids += [2] * max(0, start + length - prompt_len)
        samples = start + length >= prompt_len
        items.append(ScheduledRequest(name, (1,) * length, start, (0,), samples))
    return SchedulerOutput(tuple(items), ()), requests


@pytest.mark.parametrize(
    ("chunks", "label"),
    [
        ([(512, 0, 512)] * 3 + [(9, 9, 1)] * 29, "prefill=3x512 decode=29"),
        ([(5, 5, 1)], "prefill=0 decode=1"),
        ([(5, 4, 1)], "prefill=1x1 decode=0"),
        ([(9, 0, 9), (2, 0, 2), (2, 0, 2)], "prefill=1x9+2x2 decode=0"),
        ([(5, 0, 9)], "prefill=1x9 decode=0"),
        ([(n, 0, n) for n in (1, 2, 3, 4, 5)], "prefill=1x5+1x4+1x3+2more decode=0"),
    ],
)
def test_step_labels(chunks: list[tuple[int, int, int]], label: str) -> None:
    assert step_label(*scheduled(*chunks)) == label


def test_step_args() -> None:
    assert step_args(*scheduled((8, 0, 6), (3, 3, 1), (3, 7, 1))) == {
        "num_requests": 3,
        "num_tokens": 8,
        "num_prefill_tokens": 6,
        "num_decode_tokens": 2,
        "num_sampled": 2,
        "num_preempted": 0,
        "sum_context_len": 18,
        "max_context_len": 8,
    }


def test_the_tables_add_up(llm: LLM) -> None:
    profile = profile_steps(llm, 4)
    summary, phases, ops, shapes, layers = describe_profile(profile).split("\n\n")
    total = sum(each.duration_ns for each in profile.ranges if each.kind == "step") / 1e6
    assert f"4 in {total:.1f} ms" in summary
    assert summary.endswith("3 prefill and 3 decode tokens")
    for table, rest in ((phases, "(between phases)"), (ops, "(outside of ops)")):
        rows = [line.replace(" %", "").split("  ") for line in table.splitlines()[1:]]
        cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
        assert cells[-1][0] == rest
        spent = [float(row[-2]) if row[0] == rest else float(row[2]) for row in cells]
        assert sum(spent) == pytest.approx(total, abs=0.01 * len(spent))
        assert spent[:-1] == sorted(spent[:-1], reverse=True)
    assert {line.split()[0] for line in phases.splitlines()[1:-1]} == set(PHASES)
    assert shapes.startswith("op and shape: 12 costliest of ")
    assert [line.split()[:2] for line in layers.splitlines()[1:]] == [
        [str(index), "4"] for index in range(llm.model_config.num_layers)
    ]
