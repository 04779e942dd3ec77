"""Recorded calls: their operands, what they come to, and calls that do not fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from bench.gpu.target import tensor_flops_per_s
from bench.model_ops import record_model
from bench.op_work import work_of
from bench.recorded_call import CallView, positions, visible_keys
from bench.replay import ReplayOptions, make_calls, run_replay
from bench.replay_operands import Operands, make_plan, tokens_of_rows
from bench.replay_places import Place
from rawpaged.backend import QuantizedRows
from rawpaged.cpu.backend import CpuBackend
from rawpaged.engine.input_batch import make_batch
from rawpaged.engine.op_recorder import RECORDED_OPS, OpRecorder
from rawpaged.engine.op_recording import LinearArg, RecordedPlan, Recording, read_recording
from rawpaged.errors import RecordingError
from rawpaged.weights.checkpoint import read_model_config
from tests.bench.recordings import ORIGIN, outputs, place, recording, views
from tests.conftest import TINY
from tests.engine.helpers import request, tiny_engine

__all__ = ["place", "recording"]

CONFIG = str(TINY / "llama" / "config.json")


# Operands


def test_the_same_seed_gives_the_same_numbers(recording: Recording, place: Place) -> None:
    for view in views(recording, place.backend):
        if view.call.op == "copy_blocks":
            continue  # over pools as the backend gives them
        first, again, other = (outputs(view, seed) for seed in (1, 1, 2))
        assert first
        for name in first:
            np.testing.assert_array_equal(first[name], again[name])
            assert np.isfinite(first[name]).all(), f"{view.label} {name}"
        assert any((first[name] != other[name]).any() for name in first)


def test_operands_are_laid_out_as_recorded(recording: Recording, place: Place) -> None:
    view = next(v for v in views(recording, place.backend) if v.call.op == "rope_and_store_kv")
    made = Operands(view, 0).shared()
    for name in ("q", "k", "v"):
        arg: Any = view.call.args[name]
        assert made[name].shape == arg.shape
        assert made[name].strides == (4 * arg.row_stride, 4 * arg.shape[2], 4)
    in_place = [v for v in views(recording, place.backend) if v.call.op == "rms_norm"]
    same = [made["out"] is made["x"] for made in (Operands(v, 0).shared() for v in in_place)]
    assert any(same)
    assert not all(same)


def test_a_row_has_no_edit_of_a_token_twice() -> None:
    rows = np.array([3, 0, 3, 3, 0], np.int32)
    tokens = tokens_of_rows(rows, 3, np.random.default_rng(0))
    assert sorted(tokens[rows == 3]) == [0, 1, 2]
    assert len(set(tokens[rows == 0])) == 2
    assert not len(tokens_of_rows(rows[:0], 3, np.random.default_rng(0)))


def test_plans_are_those_of_the_engine(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index arrays that an engine makes for the same requests."""
    plans: list[Any] = []

    class Keeper:
        def plan(self, meta: Any, **heads: int) -> None:
            plans.append((meta, heads))

    engine = tiny_engine("qwen3", max_num_batched_tokens=32)
    metas: list[Any] = []
    heads_of = {"num_heads": 4, "num_kv_heads": 2}

    def noted(*args: Any) -> Any:
        metas.append((make_batch(*args), heads_of))
        return metas[-1][0]

    monkeypatch.setattr("rawpaged.engine.model_runner.make_batch", noted)
    # Recorded steps write into the arrays of a plan and make none.
    monkeypatch.setattr("rawpaged.engine.model_runner.make_decode_batch", lambda *args: None)
    engine.add_request(request("a", range(3, 45), max_tokens=3, frequency_penalty=0.5))
    engine.add_request(request("b", [5, 6, 7], max_tokens=4, temperature=0.7, logprobs=2))
    while engine.has_unfinished():
        engine.step()
    engine.close()
    for plan in recording.plans:
        make_plan(Keeper(), plan)  # type: ignore[arg-type]
    assert len(plans) == len(metas)
    for (meta, heads), (expected, expected_heads) in zip(plans, metas, strict=True):
        assert heads == expected_heads
        for field in dataclasses.fields(meta):
            made, original = getattr(meta, field.name), getattr(expected, field.name)
            if field.name == "num_prompt_tokens":
                assert made is original is None
                continue
            assert made.dtype == original.dtype
            if field.name != "token_ids":
                np.testing.assert_array_equal(made, original, err_msg=field.name)
        assert not meta.token_ids.any()


# What calls come to


def brute_force(plan: RecordedPlan, window: int | None) -> tuple[int, int]:
    read: set[tuple[int, int]] = set()
    pairs = 0
    for row, (start, end) in enumerate(itertools.pairwise(plan.query_start_loc)):
        for position in range(plan.seq_lens[row] - (end - start), plan.seq_lens[row]):
            for key in range(plan.seq_lens[row]):
                if key <= position and (window is None or key > position - window):
                    read.add((row, key))
                    pairs += 1
    return len(read), pairs


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
def test_visible_keys(window: int | None) -> None:
    plan = RecordedPlan(
        num_heads=1,
        num_kv_heads=1,
        query_start_loc=(0, 1, 6, 7, 15),
        seq_lens=(9, 5, 1, 20),
        block_tables=((0,), (0,), (0,), (0, 1)),
        slot_mapping=(0,) * 15,
        logits_rows=(),
    )
    assert visible_keys(plan, window) == brute_force(plan, window)
    expected = [*range(8, 9), *range(5), *range(1), *range(12, 20)]
    assert list(positions(plan)) == expected


def test_bytes_and_products_of_a_model(place: Place) -> None:
    model = read_model_config(CONFIG)
    recorded = record_model(place.backend, model, [3], [20])
    work = {view.label: work_of(view) for view in views(recorded, place.backend)}
    hidden, inner, vocab = model.hidden_size, model.intermediate_size, model.vocab_size
    down = work[f"linear 3x{inner}x{hidden}"]
    assert down.num_bytes == 4 * (inner * hidden + 3 * inner + 3 * hidden)
    assert down.num_flops == 2 * 3 * inner * hidden
    assert work[f"sample 3x{vocab}"].num_bytes == 4 * 3 * vocab
    assert work[f"silu_and_mul 3x{inner}"].num_bytes == 4 * 3 * 3 * inner
    assert work[f"add_rms_norm 3x{hidden}"].num_bytes == 4 * (4 * 3 * hidden + hidden)
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    attention = [w for label, w in work.items() if label.startswith("paged_attention")]
    per_token = 2 * 4 * kv_heads * size
    # Three requests with one query each, as the last one made with these sizes; then a prompt's
    # last three tokens, which have the same label.
    assert attention[-1].num_bytes == 20 * per_token + 2 * 4 * 3 * heads * size
    assert attention[-1].num_flops == 4 * heads * size * (18 + 19 + 20)
    decode = next(v for v in views(recorded, place.backend) if v.call.op == "paged_attention")
    assert work_of(decode).num_bytes == 3 * 20 * per_token + 2 * 4 * 3 * heads * size
    assert work_of(decode).num_flops == 4 * heads * size * 60
    copy = next(v for v in views(recorded, place.backend) if v.call.op == "copy_blocks")
    assert work_of(copy).num_bytes == 2 * place.backend.kv_bytes_per_block(kv_heads, size, 16)


def test_weights_stay_in_the_blocks_that_a_file_has() -> None:
    """Where the backend has them; elsewhere they are floats, as an engine would have them."""
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    rng = np.random.default_rng(0)
    kept: list[Any] = [
        QuantizedRows(name, rng.integers(0, 60, (rows, block_bytes), np.uint8))
        for name, rows, block_bytes in (("Q8_0", 64, 8 * 34), ("Q4_K", 32, 144))
    ]
    weight = backend.pack_quantized([*kept, np.ones((32, 256), np.float32)], None)
    recorder = OpRecorder(backend)
    recorder.ops().linear(np.zeros((2, 128), np.float32), np.ones((2, 256), np.float32), weight)
    recorded = recorder.recording()
    (view,) = views(recorded, backend)
    arg = view.arg("weight", LinearArg)
    types = [("Q8_0", 64), ("Q4_K", 32), (None, 32)]
    assert [(part.type, part.rows) for part in arg.row_types] == types
    bits = backend.block_bits
    stored = 256 * (64 * bits["Q8_0"] + 32 * bits["Q4_K"] + 32 * 16) / 8
    assert work_of(view).num_bytes == int(stored) + 2 * 4 * (256 + 128)
    (call,) = make_calls(view, 1, 0, 2**30)
    call()
    assert call.keywords["weight"].row_types == tuple(types)
    assert np.isfinite(call.keywords["out"]).all()

    class Floats:
        """A backend that has no blocks."""

        block_bits: ClassVar[dict[str, float]] = {}
        dtype = activation_dtype = "float32"

    floats = CallView(recorded, recorded.calls[0], Floats())  # type: ignore[arg-type]
    assert floats.weight_bytes("weight") == 4 * 128 * 256
    backend.close()


def test_a_models_recording_has_every_op(place: Place) -> None:
    recorded = record_model(place.backend, read_model_config(CONFIG), [1, 3], [20, 2])
    assert {call.op for call in recorded.calls} == set(RECORDED_OPS)
    assert [step.name for step in recorded.steps] == [
        "prefill=0 decode=1 context=20",
        "prefill=0 decode=3 context=20",
        "prefill=1x3 decode=0 context=20",
        "prefill=0 decode=1 context=2",
        "prefill=0 decode=3 context=2",
    ]
    for view in views(recorded, place.backend):
        work_of(view)
    with pytest.raises(ValueError, match="no step has"):
        record_model(place.backend, read_model_config(CONFIG), [10**9], [20])


def test_floats_have_the_types_of_the_backend(recording: Recording, place: Place) -> None:
    """The residual stream and logits are float32 everywhere, activations are not."""

    class Half:
        activation_dtype = "bfloat16"

    kinds: dict[tuple[str, str], set[str]] = {}
    for view in views(recording, Half()):  # type: ignore[arg-type]
        for name, arg in view.call.args.items():
            if getattr(arg, "dtype", None) == "float32":
                rank = len(getattr(arg, "shape", ()))
                kinds.setdefault((view.call.op, f"{name}{rank}"), set()).add(view.float_dtype(name))
    assert kinds.pop(("linear", "out2")) == {"bfloat16", "float32"}
    wide = {key for key, found in kinds.items() if found == {"float32"}}
    assert wide == {
        *(("embed", "out2"), ("rms_norm", "x2"), ("rms_norm", "weight1")),
        *(("add_rms_norm", "residual2"), ("add_rms_norm", "weight1")),
        *(("rope_and_store_kv", "cos_sin2"), ("edit_logits", "logits2")),
        *(("sample", "logits2"), ("token_logprobs", "logits2")),
    }
    assert all(found == {"bfloat16"} for key, found in kinds.items() if key not in wide)


def test_tensor_cores_of_data_sheets() -> None:
    assert tensor_flops_per_s(90, 132, 1.83e9) == pytest.approx(989e12, rel=0.01)  # H100
    assert tensor_flops_per_s(80, 108, 1.41e9) == pytest.approx(312e12, rel=0.01)  # A100
    assert tensor_flops_per_s(89, 128, 2.52e9) == pytest.approx(165e12, rel=0.01)  # RTX 4090
    assert tensor_flops_per_s(75, 40, 1e9) is None


# Hostile recordings


def _set(*way: Any, to: Any) -> Callable[[Any], None]:
    def change(args: Any) -> None:
        for part in way[:-1]:
            args = args[part]
        args[way[-1]] = to

    return change


def array(*shape: int, **more: Any) -> dict[str, Any]:
    return {"kind": "array", "shape": list(shape), "dtype": "float32", **more}


CHANGES: list[tuple[str, Callable[[Any], None], str]] = [
    ("embed", _set("table", "in_features", to=63), "rows of"),
    ("embed", _set("token_ids", to=array(2)), "token_ids"),
    ("embed", _set("more", to={"kind": "number", "value": 1}), "arguments"),
    ("rms_norm", _set("weight", "shape", to=[5]), "weight"),
    ("rms_norm", _set("out", to=array(1, 5)), "out is not like x"),
    ("add_rms_norm", _set("residual", "shape", 0, to=1000), "shapes differ"),
    ("add_rms_norm", _set("eps", "value", to="0.1"), ""),
    ("linear", _set("x", "shape", 1, to=8), "columns"),
    ("linear", _set("out", "shape", 0, to=1000), "out is not"),
    ("linear", _set("weight", to={"kind": "number", "value": 4}), "LinearArg"),
    ("rope_and_store_kv", _set("cos_sin", "shape", 0, to=1), "position"),
    ("rope_and_store_kv", _set("cache", "num_blocks", to=1), "slot"),
    ("rope_and_store_kv", _set("k", "shape", 1, to=1), "k and v"),
    ("rope_and_store_kv", _set("positions", "name", to="block_tables"), "positions is the plan's"),
    ("rope_and_store_kv", _set("positions", "plan", to=1), "positions and slots"),
    ("copy_blocks", _set("pairs", "values", to=[0, -1, 1, 2]), "blocks"),
    ("copy_blocks", _set("pairs", "values", to=[0, 1, 1, 2]), "read and written"),
    ("copy_blocks", _set("targets", "num_layers", to=2**20), "layers"),
    ("paged_attention", _set("plan", "plan", to=1), "plan's"),
    ("paged_attention", _set("cache", "num_blocks", to=1), "in the pool"),
    ("paged_attention", _set("cache", "block_size", to=1), "keys in"),
    ("paged_attention", _set("cache", "num_kv_heads", to=1), "cache"),
    ("paged_attention", _set("sliding_window", "value", to=0), "window"),
    ("paged_attention", _set("sliding_window", "value", to=0.5), "window"),
    ("paged_attention", _set("scale", "value", to=None), "scale"),
    ("silu_and_mul", _set("gate_up", "shape", 1, to=5), "twice"),
    ("gather_rows", _set("x", "shape", 0, to=1), "a row is not one of"),
    ("gather_rows", _set("rows", to=array(1, dtype="int32", values=[-1])), "row"),
    ("edit_logits", _set("edits", "arrays", "rows", "values", 0, to=-1), "row"),
    ("edit_logits", _set("edits", "arrays", "bias", "shape", to=[1000]), ""),
    ("edit_logits", _set("edits", "type", to="SamplingRows"), "no LogitEdits"),
    ("edit_logits", _set("logits", "shape", 1, to=0), "more edits"),
    ("sample", _set("logits", "shape", 0, to=1000), "rows"),
    ("sample", _set("rows", "arrays", "seeds", to=array(1)), ""),
    ("token_logprobs", _set("k", "value", to=10**9), "k="),
    ("token_logprobs", _set("token_ids", "shape", to=[1000]), "token_ids"),
]


@pytest.mark.parametrize(("op", "change", "words"), CHANGES)
def test_calls_that_do_not_fit_are_not_made(
    recording: Recording, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], op: str, change: Callable[[Any], None], words: str,
) -> None:  # fmt: skip
    """What is wrong is found before a kernel meets it."""
    tree = json.loads(msgspec.json.encode(recording))
    index = next(i for i, call in enumerate(tree["calls"]) if call["op"] == op)
    change(tree["calls"][index]["args"])
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(tree))
    try:
        changed = read_recording(path)
    except RecordingError:
        assert words == "", "this one is for the call's own checks"
        return
    if op != "copy_blocks":  # whose check of pairs is the backend's own

        def wrong(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("it was made")

        monkeypatch.setattr(place.backend, op, wrong)
    options = ReplayOptions(only=[index], calls=1)
    assert run_replay(changed, "", place, options, ORIGIN) == 1
    assert words in capsys.readouterr().err


def test_an_op_that_does_not_exist(recording: Recording, place: Place) -> None:
    call = msgspec.structs.replace(recording.calls[0], op="download")
    with pytest.raises(RecordingError, match="no op is called 'download'"):
        work_of(CallView(recording, call, place.backend))
