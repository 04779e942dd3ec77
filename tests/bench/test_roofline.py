"""The roofline model on numbers that can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.roofline import (
    H200,
    LLAMA_3_8B,
    RTX_4090,
    Gpu,
    Model,
    Part,
    Step,
    document,
    kv_bytes,
    linear_launches,
    parts_of,
    step_seconds,
)

_TINY = Model(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def by_name(model: Model, step: Step, gpu: Gpu = H200) -> dict[str, Part]:
    return {part.name: part for part in parts_of(model, step, gpu)}


def test_known_sizes_of_llama_3_8b() -> None:
    # 8.03 billion parameters, of which the norms are 266,240.
    assert LLAMA_3_8B.weight_bytes == 2 * (8_030_261_248 - 266_240)
    # 128 KiB of keys and values a token.
    assert kv_bytes(LLAMA_3_8B, Step(1, 1, 1)) == 128 * 1024
    assert kv_bytes(LLAMA_3_8B, Step(64, 1, 8192)) == 64 * 2**30


def test_a_step_worked_out_by_hand() -> None:
    parts = by_name(_TINY, Step(batch=3, queries=2, context=5))
    # 16 rows of 8 weights and a bias, 6 rows of x and out; two layers.
    assert parts["qkv"] == Part("qkv", 2, 2 * (256 + 64 + 96 + 192), 2 * 2 * 6 * 16 * 8)
    assert parts["gate_up, silu"].num_bytes == 2 * (512 + 128 + 96 + 192)
    # Only the last token of a request has logits, in float32.
    assert parts["lm_head"] == Part("lm_head", 1, 160 + 40 + 48 + 120, 2 * 3 * 10 * 8)
    # Queries 4 and 5 of 5 see 4 and 5 keys; 3 requests, 2 heads of 4.
    assert parts["attention"].num_flops == 2 * 4 * 2 * 4 * 3 * (4 + 5)
    assert parts["attention"].num_bytes == 2 * (3 * 5 * 2 * 4 * 2) + 2 * (2 * 6 * 8 * 2)
    assert parts["norms"] == Part("norms", 5, 5 * (6 * 8 * 12 + 32), 0)
    assert parts["rope, KV store"].num_bytes == 2 * 6 * (2 * 2 * 16 + 16)
    assert parts["sampling"].num_bytes == 120


def test_time_is_that_of_the_narrower_limit() -> None:
    gpu = Gpu("made up", 100.0, 1000.0, 1.0, 90, 1)
    assert Part("memory", 1, 500, 100).seconds(gpu) == 5.0
    assert Part("arithmetic", 1, 500, 9000).seconds(gpu) == 9.0


def test_decoding_one_request_is_bound_by_the_weights() -> None:
    # All but the embedding: 7.5 billion weights.
    weights = 2 * (32 * 218_103_808 + 128256 * 4096)
    for gpu in (H200, RTX_4090):
        kernels, _, _ = step_seconds(parts_of(LLAMA_3_8B, Step(1, 1, 1024), gpu), gpu)
        assert kernels == pytest.approx(weights / gpu.bytes_per_s, rel=0.02)


def test_a_long_prefill_is_bound_by_arithmetic() -> None:
    step = Step(1, 8192, 8192)
    linears = 2 * 8192 * 32 * 218_103_808
    attention = 32 * 4 * 4096 * 8192 * 8193 // 2
    kernels, _, _ = step_seconds(parts_of(LLAMA_3_8B, step, H200), H200)
    assert kernels == pytest.approx((linears + attention) / H200.flops_per_s, rel=0.06)


def test_launches_add_gaps_or_make_the_gpu_wait() -> None:
    gpu = Gpu("made up", 1e9, 1e12, 1.0, 90, 1)
    kernels, graph, eager = step_seconds([Part("short", 100, 100_000, 0)], gpu)
    assert (kernels, graph, eager) == pytest.approx((100e-6, 210e-6, 3000e-6))
    kernels, graph, eager = step_seconds([Part("long", 100, 10**7, 0)], gpu)
    assert (kernels, graph, eager) == pytest.approx((10e-3, 10.11e-3, 10.1e-3))


def test_launches_of_products() -> None:
    assert linear_launches(H200, 1, 4096, 4096) == 1
    # 64 tiles for 132 SMs: split over K, and reduced.
    assert linear_launches(H200, 64, 4096, 4096) == 2
    assert linear_launches(H200, 64, 6144, 4096) == 1
    assert linear_launches(H200, 64, 4096, 64) == 1
    launches = [part.launches for part in parts_of(LLAMA_3_8B, Step(1, 1, 1024), H200)]
    assert sum(launches) == 32 * 9 + 5


def test_the_document_holds_what_the_program_prints() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "roofline.md").read_text(encoding="utf-8")
    assert document() in text, "run python -m bench.roofline and put its tables into the document"
