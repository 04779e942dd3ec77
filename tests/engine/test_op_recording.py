"""Recordings of ops: that they hold what was called and nothing of users, and hostile files."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rawpaged import LLM
from rawpaged.backend import Backend, BatchMeta, KVCache
from rawpaged.cpu.backend import CpuBackend
from rawpaged.engine.engine import Engine
from rawpaged.engine.engine_output import EngineOutput
from rawpaged.engine.op_recorder import RECORDED_OPS, OpRecorder
from rawpaged.engine.op_recording import (
    MAX_FILE_BYTES,
    ArrayArg,
    CachesArg,
    FieldsArg,
    PlanArg,
    PlanArrayArg,
    RecordedCall,
    Recording,
    SameArg,
    read_recording,
    write_recording,
)
from rawpaged.engine.profiling import Profile, ProfileOptions, Profiler
from rawpaged.errors import ProfileError, RecordingError, TraceFileError
from rawpaged.request import Request
from tests.engine.helpers import recorded_logits, request, run, tiny_engine
from tests.engine.test_profiling import OPS
from tests.tiny import tiny_config


def requests() -> list[Request]:
    """Chunks of prompts, decode steps, penalties, biases, log-probabilities."""
    rng = random.Random(4)
    return [
        request(
            str(i),
            [rng.randrange(3, 320) for _ in range(rng.randint(1, 40))],
            max_tokens=6,
            temperature=float(i % 2),
            seed=i,
            frequency_penalty=0.5 if i == 2 else 0.0,
            min_tokens=3 if i == 2 else 0,
            stop_token_ids=[7] if i == 2 else None,
            logprobs=2 if i == 3 else None,
            prompt_logprobs=1 if i == 4 else None,
        )
        for i in range(5)
    ]


def record(
    engine: Engine, path: Path | None, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[dict[str, list[int]], Profile]:
    """Run the requests, all or some steps of them under a profile."""
    profiler, untraced_step = Profiler(engine), engine.step

    def step() -> list[EngineOutput]:
        with profiler.step():
            return untraced_step()

    monkeypatch.setattr(engine, "step", step)
    profiler.start(ProfileOptions(record_path=path, **options))
    tokens = run(engine, requests())
    return tokens, profiler.stop()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recording, Profile, list[BatchMeta]]:
    """A recording, the trace of the same steps, and the batches that the backend was given."""
    path = tmp_path_factory.mktemp("recording") / "ops.json"
    engine = tiny_engine(request.param, max_num_batched_tokens=32)
    metas: list[BatchMeta] = []
    plan = engine.runner.backend.plan
    with pytest.MonkeyPatch.context() as monkeypatch:

        def noted(meta: BatchMeta, **heads: int) -> Any:
            metas.append(meta)
            return plan(meta, **heads)

        monkeypatch.setattr(engine.runner.backend, "plan", noted)
        _, profile = record(engine, path, monkeypatch)
    engine.close()
    return read_recording(path), profile, metas


# What is in it


def test_every_op_of_the_seam_is_recorded() -> None:
    assert set(RECORDED_OPS) == set(OPS) - {"upload", "download"}
    assert len(set(RECORDED_OPS)) == len(RECORDED_OPS)


def test_the_calls_are_those_of_the_trace_step_by_step(
    recorded: tuple[Recording, Profile, list[BatchMeta]],
) -> None:
    recording, profile, _ = recorded
    steps = [each.name for each in profile.ranges if each.kind == "step"]
    assert [step.name for step in recording.steps] == steps
    traced: list[list[str]] = []
    for each in profile.ranges:
        if each.kind == "step":
            traced.append([])
        op = each.name.split()[0]
        if each.kind == "op" and op not in ("upload", "download"):
            traced[-1].append(op)
    made = [[recording.calls[call].op for call in step.calls] for step in recording.steps]
    assert made == traced
    assert {call.op for call in recording.calls} == set(RECORDED_OPS) - {"copy_blocks"}
    # Layers make the same calls, so there are far fewer of them than were made.
    counts = Counter(call for step in recording.steps for call in step.calls)
    assert max(counts.values()) > len(steps)


def test_plans_are_the_batches(recorded: tuple[Recording, Profile, list[BatchMeta]]) -> None:
    recording, _, metas = recorded
    assert len(recording.plans) == len(metas) == len(recording.steps)
    for plan, meta in zip(recording.plans, metas, strict=True):
        assert plan.query_start_loc == tuple(meta.query_start_loc)
        assert plan.seq_lens == tuple(meta.seq_lens)
        assert plan.slot_mapping == tuple(meta.slot_mapping)
        assert plan.logits_rows == tuple(meta.logits_rows)
        for table, row in zip(plan.block_tables, meta.block_tables, strict=True):
            assert table == tuple(row[: len(table)])
        used = [-(-length // 16) for length in plan.seq_lens]
        assert [len(table) for table in plan.block_tables] == used
    for index, step in enumerate(recording.steps):
        for call in (recording.calls[call] for call in step.calls):
            plans = {
                arg.plan for arg in call.args.values() if isinstance(arg, (PlanArg, PlanArrayArg))
            }
            assert plans <= {index}


def _rank(call: RecordedCall) -> int:
    out = call.args["out"]
    assert isinstance(out, ArrayArg)
    return len(out.shape)


def _fields(call: RecordedCall) -> dict[str, ArrayArg]:
    edits = call.args["edits"]
    assert isinstance(edits, FieldsArg)
    return edits.arrays


def calls_of(recording: Recording, op: str) -> list[RecordedCall]:
    return [call for call in recording.calls if call.op == op]


def test_shapes_views_and_contents(recorded: tuple[Recording, Profile, list[BatchMeta]]) -> None:
    recording, _, metas = recorded
    first = metas[0]
    tokens = len(first.token_ids)
    (rope,) = [
        call
        for call in calls_of(recording, "rope_and_store_kv")
        if call.args["positions"] == PlanArrayArg(0, "positions")
    ]
    q, k = rope.args["q"], rope.args["k"]
    assert isinstance(q, ArrayArg)
    assert isinstance(k, ArrayArg)
    assert (q.shape[0], q.dtype) == (tokens, "float32")
    assert q.row_stride == k.row_stride == (q.shape[1] + 2 * k.shape[1]) * q.shape[2]
    assert q.values is None
    assert rope.args["slot_mapping"] == PlanArrayArg(0, "slot_mapping")
    # Heads are normalised in place where a model does that; the residual stream is not.
    in_place = [call for call in calls_of(recording, "rms_norm") if _rank(call) == 3]
    assert all(call.args["x"] == SameArg("out") for call in in_place)
    edits = calls_of(recording, "edit_logits")
    assert all(_fields(call)["rows"].values for call in edits)
    # A stop token that may not come yet is biased by minus infinity, which JSON has not.
    biases = [value for call in edits for value in _fields(call)["bias"].values or ()]
    assert min(biases) == float(np.finfo(np.float32).min)


def test_no_token_ids_are_in_it(recorded: tuple[Recording, Profile, list[BatchMeta]]) -> None:
    """Nor is anything else that has the length and the values of a prompt."""
    recording, _, metas = recorded
    prompts = {tuple(meta.token_ids.tolist()) for meta in metas if len(meta.token_ids) > 4}
    assert prompts

    def lists(value: Any) -> list[tuple[Any, ...]]:
        if isinstance(value, dict):
            return [found for item in value.values() for found in lists(item)]
        if isinstance(value, list):
            flat = [tuple(value)] if not any(isinstance(v, (list, dict)) for v in value) else []
            return flat + [found for item in value for found in lists(item)]
        return []

    assert not prompts & set(lists(json.loads(msgspec.json.encode(recording))))
    for call in recording.calls:
        for name, arg in call.args.items():
            arrays = arg.arrays if isinstance(arg, FieldsArg) else {name: arg}
            tokens = arrays.get("token_ids")
            assert not isinstance(tokens, ArrayArg) or tokens.values is None


def test_results_are_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, traced = (tiny_engine(max_num_batched_tokens=32) for _ in range(2))
    expected = run(plain, requests())
    tokens, _ = record(traced, tmp_path / "ops.json", monkeypatch)
    assert tokens == expected
    assert recorded_logits(traced) == recorded_logits(plain)
    assert traced.runner._ops is traced.runner.model._ops is traced.runner.backend
    plain.close()
    traced.close()


def test_pools_are_the_devices_or_the_hosts() -> None:
    backend = CpuBackend(dtype="float32", num_threads=1)
    device, host = ([backend.new_kv_cache(4, 2, 16, 16)] for _ in range(2))
    recorder = OpRecorder(backend, lambda: device)
    recorder.push("step", "step=1", {})
    ops = recorder.ops()
    pairs = np.array([[0, 1], [2, 3]], np.int64)
    for targets, sources in ((device, host), (host, device), (device, device)):
        ops.copy_blocks(targets, sources, pairs)
    recorder.pop()
    recording = recorder.recording()

    def memory(call: RecordedCall, name: str) -> str:
        arg = call.args[name]
        assert isinstance(arg, (CachesArg, SameArg))
        return arg.memory if isinstance(arg, CachesArg) else f"same as {arg.name}"

    assert [(memory(c, "targets"), memory(c, "sources")) for c in recording.calls] == [
        ("device", "host"),
        ("host", "device"),
        ("device", "same as targets"),
    ]
    arg = recording.calls[0].args["pairs"]
    assert isinstance(arg, ArrayArg)
    assert (arg.shape, arg.values) == ((2, 2), (0, 1, 2, 3))
    backend.close()


def test_only_ops_pass_through_the_recorder() -> None:
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    ops = OpRecorder(backend).ops()
    public = {name for name in vars(Backend) if not name.startswith("_")}
    for name in public - set(RECORDED_OPS) - {"plan"}:
        assert getattr(ops, name) == getattr(backend, name)
    backend.close()


# Where it goes, and when it ends


def test_a_full_recording_ends_the_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rawpaged.engine.op_recorder.OpRecorder.is_full", True)
    engine = tiny_engine()
    _, profile = record(engine, tmp_path / "ops.json", monkeypatch)
    engine.close()
    assert (profile.num_steps, profile.is_truncated) == (1, True)
    assert len(read_recording(tmp_path / "ops.json").steps) == 1


def test_numbers_are_counted() -> None:
    backend = CpuBackend(dtype="float32", num_threads=1)
    recorder = OpRecorder(backend, max_numbers=20)
    recorder.push("step", "step=1", {})
    ops = recorder.ops()
    rows = backend.upload(np.arange(8, dtype=np.int32))
    x, out = np.zeros((9, 4), np.float32), np.zeros((8, 4), np.float32)
    assert not recorder.is_full
    for count in range(1, 13):  # eight values once, and twelve calls
        ops.gather_rows(out, x, rows)
        assert recorder.is_full == (8 + count >= 20)
    backend.close()


def test_without_a_path_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    _, profile = record(engine, None, monkeypatch)
    engine.close()
    assert profile.record_path is None


def test_both_files_or_a_reason(tmp_path: Path) -> None:
    with LLM(tiny_config()) as llm:
        ops, trace = tmp_path / "ops.json", tmp_path / "trace.json"
        llm.start_profile(trace, record_path=ops)
        llm.generate([[5, 6, 7]], use_tqdm=False)
        profile = llm.stop_profile()
        assert (profile.path, profile.record_path) == (trace, ops)
        assert len(read_recording(ops).steps) == profile.num_steps
        llm.start_profile(record_path=tmp_path / "no" / "ops.json")
        llm.generate([[5, 6, 7]], use_tqdm=False)
        with pytest.raises(TraceFileError, match=r"ops\.json could not be written"):
            llm.stop_profile()
        with pytest.raises(ProfileError):
            llm.stop_profile()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ops.json", "trace.json"]


def test_one_that_is_too_large_is_not_written(
    recorded: tuple[Recording, Profile, list[BatchMeta]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("rawpaged.engine.op_recording.MAX_FILE_BYTES", 1000)
    with pytest.raises(RecordingError, match="record fewer steps"):
        write_recording(tmp_path / "ops.json", recorded[0])
    assert not list(tmp_path.iterdir())


# Hostile files


def refused(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=words) as info:
        read_recording(path)
    assert len(str(info.value)) < 1000


def test_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    with pytest.raises(RecordingError, match="No such file"):
        read_recording(path)
    with pytest.raises(RecordingError, match="directory"):
        read_recording(tmp_path)
    for content in (b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, b'{"format": "rawpaged-ops"}'):
        refused(path, content, "no recording of ops")
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(RecordingError, match="no recording"):
        read_recording(path)


def _set(*way: Any, to: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for part in way[:-1]:
            tree = tree[part]
        tree[way[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("version", to=2), "version"),
        (_set("format", to="other"), "format"),
        (_set("more", to=1), "more"),
        (_set("plans", 0, "query_start_loc", to=[]), "query_start_loc"),
        (_set("plans", 0, "query_start_loc", 0, to=1), "query_start_loc"),
        (_set("plans", 0, "seq_lens", 0, to=0), "seq_lens|1"),
        (_set("plans", 0, "seq_lens", 0, to=1), "more than its seq_len"),
        (_set("plans", 0, "seq_lens", 0, to=2**31), "2147483647"),
        (_set("plans", 0, "seq_lens", 0, to=1.5), "int"),
        (_set("plans", 0, "block_tables", to=[]), "block tables"),
        (_set("plans", 0, "block_tables", 0, 0, to=-1), "0"),
        (_set("plans", 0, "slot_mapping", to=[]), "slots"),
        (_set("plans", 0, "logits_rows", to=[10**6]), "logits_rows"),
        (_set("plans", 0, "num_kv_heads", to=3), "KV heads"),
        (_set("plans", 0, "num_prompt_tokens", to=[]), "num_prompt_tokens"),
        (_set("steps", 0, "calls", 0, to=10**6), "not there"),
        (_set("calls", 0, "args", "out", to={"kind": "plan", "plan": 10**6}), "no plan"),
        (_set("calls", 0, "args", "out", to={"kind": "same", "name": "token_ids"}), "could be"),
        (_set("calls", 0, "args", "out", "kind", to="file"), "kind|file"),
        (
            _set("calls", 0, "args", "table", "row_types", to=[{"type": "Q8_0", "rows": 1}]),
            "of 1 rows",
        ),
        (_set("calls", 0, "args", "out", "shape", to=[]), "no shape"),
        (_set("calls", 0, "args", "out", "shape", to=[2**31 - 1] * 3), "no shape"),
        (_set("calls", 0, "args", "out", "shape", to=[1] * 100), "no shape"),
        (_set("calls", 0, "args", "out", "values", to=[1]), "values"),
        (_set("calls", 0, "args", "out", to=[1]), "object"),
        (
            _set("calls", 0, "args", "out",
                 to={"kind": "array", "shape": [2], "dtype": "int32", "values": [1, 2**31]}),
            "not all int32",
        ),
        (
            _set("calls", 0, "args", "out",
                 to={"kind": "array", "shape": [2], "dtype": "object", "values": [1, 2]}),
            "not all object",
        ),
        (
            _set("calls", 0, "args", "out",
                 to={"kind": "array", "shape": [2, 3], "dtype": "x", "row_stride": 2}),
            "rows of 3",
        ),
    ],
)  # fmt: skip
def test_what_is_not_consistent(
    recorded: tuple[Recording, Profile, list[BatchMeta]],
    tmp_path: Path,
    change: Callable[[Any], None],
    words: str,
) -> None:
    tree = json.loads(msgspec.json.encode(recorded[0]))
    assert tree["calls"][0]["op"] == "embed"
    change(tree)
    refused(tmp_path / "ops.json", json.dumps(tree).encode(), words)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_change_is_refused_or_gives_a_recording(
    recorded: tuple[Recording, Profile, list[BatchMeta]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    content = bytearray(msgspec.json.encode(recorded[0]))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.sampled_from(b'0123456789-.,[]{}":eE tfn\xff'))
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_bytes(content)
    try:
        recording = read_recording(path)
    except RecordingError:
        return
    assert isinstance(recording, Recording)


def test_a_pool_of_one_cache_is_described_alike_by_all_backends() -> None:
    for dtype in ("float32", "bfloat16"):
        backend = CpuBackend(dtype=dtype, num_threads=1)
        cache: KVCache = backend.new_kv_cache(5, 2, 80, 16)
        recorder = OpRecorder(backend, partial(list, [cache]))
        recorder.ops().copy_blocks([cache], [cache], np.zeros((0, 2), np.int64))
        arg = recorder.recording().calls[0].args["targets"]
        assert isinstance(arg, CachesArg)
        assert msgspec.structs.astuple(arg.cache) == (5, 2, 80, 16)
        backend.close()
