"""The numbers of the memory plan, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawpaged.backend import KVScales
from rawpaged.config import EngineConfig, PreemptionCosts
from rawpaged.cpu.backend import CpuBackend
from rawpaged.engine import memory_plan
from rawpaged.engine.memory_plan import (
    MemoryPlan,
    check_memory,
    make_plan,
    preemption_mode,
    resolve_dtype,
    resolve_kv_cache_dtype,
    scheduler_config,
)
from rawpaged.errors import BackendError, ConfigError
from rawpaged.models.config import ModelConfig, RopeConfig
from tests.tiny import tiny_config

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=500000.0),
    tie_word_embeddings=False,
    dtype="bfloat16",
)
BLOCK_BYTES = 16 * 131072


class Machine(CpuBackend):
    """A CPU backend that says how much memory there is."""

    def __init__(
        self,
        dtype: str = "bfloat16",
        available: int = 0,
        total: int = 0,
        kv_cache_dtype: str | None = None,
    ) -> None:
        super().__init__(dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=1)
        self.memory = (available, total)

    def memory_info(self) -> tuple[int, int]:
        return self.memory


def plan_for(
    model: ModelConfig = LLAMA_3_8B, backend: Machine | None = None, **flags: Any
) -> MemoryPlan:
    sizes = {"max_model_len": None, "num_gpu_blocks_override": None, "max_num_seqs": 64}
    return make_plan(tiny_config(**{**sizes, **flags}), model, backend or Machine())


def test_llama_3_8b_in_50_gigabytes() -> None:
    plan = plan_for(kv_cache_memory_bytes=50 * 10**9)
    assert plan.bytes_per_token == 131072
    assert plan.num_blocks == 50 * 10**9 // BLOCK_BYTES == 23841
    assert plan.kv_bytes <= 50 * 10**9 < plan.kv_bytes + BLOCK_BYTES
    assert plan.max_model_len == 8192
    assert plan.reserved_requests() == 46
    assert plan.paged_requests(1000) == 378
    assert plan.paged_requests(8192) == 46
    assert plan.weights_bytes == 2 * 8_030_261_248
    text = plan.describe((1000,))
    assert "50 GB: 23841 blocks of 16 = 381456 tokens, 131072 bytes a token as bfloat16" in text
    assert "378 of 1000 tokens, paged; 46 if each reserved 8192" in text


@pytest.mark.parametrize("length", [1, 15, 16, 17, 999, 8192])
def test_paged_requests_hold_whole_blocks(length: int) -> None:
    plan = plan_for(num_gpu_blocks_override=1000)
    blocks = (length + 15) // 16
    assert plan.paged_requests(length) * blocks <= 1000 < (plan.paged_requests(length) + 1) * blocks


def test_override() -> None:
    plan = plan_for(num_gpu_blocks_override=40, block_size=32)
    assert (plan.num_blocks, plan.num_tokens, plan.block_size) == (40, 1280, 32)


def test_max_model_len_is_lowered_to_the_pool() -> None:
    assert plan_for(num_gpu_blocks_override=40).max_model_len == 640
    assert plan_for(num_gpu_blocks_override=40, max_model_len=640).max_model_len == 640
    assert plan_for(num_gpu_blocks_override=10000).max_model_len == 8192


def test_max_model_len_that_does_not_fit() -> None:
    """The message holds the number of bytes with which it does fit."""
    with pytest.raises(ConfigError, match=r"max_model_len=641 .* 40 blocks of 16 = 640") as info:
        plan_for(num_gpu_blocks_override=40, max_model_len=641)
    assert f"needs {41 * BLOCK_BYTES} bytes" in str(info.value)
    plan = plan_for(kv_cache_memory_bytes=41 * BLOCK_BYTES, max_model_len=641)
    assert plan.max_model_len == 641
    with pytest.raises(ConfigError, match="max_model_len=641"):
        plan_for(kv_cache_memory_bytes=41 * BLOCK_BYTES - 1, max_model_len=641)


def test_max_model_len_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=8193 .*max_position_embeddings=8192"):
        plan_for(kv_cache_memory_bytes=50 * 10**9, max_model_len=8193)


def test_memory_for_less_than_a_block() -> None:
    with pytest.raises(ConfigError, match=f"one takes {BLOCK_BYTES} bytes"):
        plan_for(kv_cache_memory_bytes=BLOCK_BYTES - 1)


def test_size_of_the_pool_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override and kv_cache_memory_bytes"):
        plan_for(kv_cache_memory_bytes=10**9, num_gpu_blocks_override=40)


@pytest.mark.parametrize("block_size", [1, 8, 17, 24])
def test_block_size_that_the_backend_cannot_do(block_size: int) -> None:
    with pytest.raises(BackendError, match=rf"block_size={block_size} is not a multiple of 16"):
        plan_for(block_size=block_size, num_gpu_blocks_override=40)


def test_share_of_the_available_memory() -> None:
    """A quarter of what weights and workspace leave, but no more than could ever be used."""
    fixed = plan_for(num_gpu_blocks_override=1000)
    taken = fixed.weights_bytes + fixed.workspace_bytes
    plan = plan_for(backend=Machine(available=taken + 400 * BLOCK_BYTES))
    assert plan.num_blocks == 100
    assert plan.max_model_len == 1600
    plan = plan_for(backend=Machine(available=10**15), max_num_seqs=2, max_model_len=100)
    assert plan.num_blocks == 2 * 7


def test_too_little_memory() -> None:
    with pytest.raises(BackendError, match=r"16 GB of memory is available"):
        plan_for(backend=Machine(available=16 * 10**9))


def test_more_than_the_machine_has() -> None:
    plan = plan_for(num_gpu_blocks_override=1000)
    check_memory(plan, Machine(total=plan.total_bytes))
    with pytest.raises(BackendError, match=r"KV pool \(2.097 GB\)"):
        check_memory(plan, Machine(total=plan.total_bytes - 1))


@pytest.mark.parametrize(
    ("flag", "model", "dtype"),
    [
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_dtype(flag: str, model: str, dtype: str) -> None:
    config = tiny_config(dtype=flag)
    assert resolve_dtype(config, replace(LLAMA_3_8B, dtype=model)) == dtype


def test_float32_takes_twice_the_memory() -> None:
    half, full = (
        plan_for(backend=Machine(dtype), num_gpu_blocks_override=40)
        for dtype in ("bfloat16", "float32")
    )
    assert full.bytes_per_token == 2 * half.bytes_per_token
    assert full.weights_bytes == 2 * half.weights_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_a_cache_of_bytes_takes_half_or_a_quarter(kv_cache_dtype: str) -> None:
    for dtype, factor in (("bfloat16", 2), ("float32", 4)):
        backend = Machine(dtype, kv_cache_dtype=kv_cache_dtype)
        plan = plan_for(backend=backend, kv_cache_memory_bytes=50 * 10**9)
        whole = plan_for(backend=Machine(dtype), kv_cache_memory_bytes=50 * 10**9)
        assert factor * plan.bytes_per_token == whole.bytes_per_token
        assert plan.num_blocks // whole.num_blocks == factor
        assert plan.weights_bytes == whole.weights_bytes
        assert f"{plan.bytes_per_token} bytes a token as {kv_cache_dtype}" in plan.describe()
        cache = backend.new_kv_cache(3, 8, 128, 16, KVScales(*np.ones((2, 8), np.float32)))
        layers = LLAMA_3_8B.num_layers
        assert cache.keys.nbytes + cache.values.nbytes == 3 * 16 * plan.bytes_per_token // layers


@pytest.mark.parametrize(
    ("flag", "resolved"),
    [("auto", "float32"), ("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("int8", "int8")],
)
def test_kv_cache_dtype(flag: str, resolved: str) -> None:
    assert resolve_kv_cache_dtype(tiny_config(kv_cache_dtype=flag), "float32") == resolved


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1, "1 B"), (999, "999 B"), (1000, "1 kB"), (2_500_000, "2.5 MB"), (5 * 10**10, "50 GB")],
)
def test_size_in_words(num_bytes: int, text: str) -> None:
    assert memory_plan._size(num_bytes) == text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dtype": "float16"}, "dtype='float16' is not one of bfloat16, float32"),
        ({"device": "cuda", "dtype": "float32"}, "dtype='float32' is not one of bfloat16, float16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "twice the precision; say kv_cache_dtype='fp8_e4m3'"),
        (
            {"kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype='bfloat16' is not one of auto, fp8, fp8_e4m3, int8",
        ),
        ({"kv_cache_dtype": None}, "kv_cache_dtype=None must be a string"),
        ({"seed": 7}, "seed=7 is for load_format='dummy'"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is for device='cuda'"),
        ({"async_scheduling": True}, "async_scheduling=True is for device='cuda'"),
        ({"async_scheduling": 1}, "async_scheduling=1 must be true, false or None"),
        ({"device": "cuda", "gpu_memory_utilization": 1.5}, "must be in"),
        ({"device": "cuda", "gpu_memory_utilization": float("nan")}, "must be in"),
        ({"device": "cuda", "num_threads": 2}, "num_threads is for device='cpu'"),
    ],
    ids=str,
)
def test_what_one_device_has_and_the_other_not(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        EngineConfig(model="m", **flags)


def test_swap_space() -> None:
    plan = plan_for(kv_cache_memory_bytes=10**9, swap_space=1.5)
    assert plan.num_host_blocks == 3 * 2**29 // BLOCK_BYTES == 768
    assert plan.swap_bytes == 768 * BLOCK_BYTES
    assert "swap space   1.611 GB of the host: 768 blocks" in plan.describe()
    assert "swap" not in plan_for(kv_cache_memory_bytes=10**9).describe()


def test_a_swap_space_without_a_block() -> None:
    with pytest.raises(ConfigError, match=f"holds no block: one takes {BLOCK_BYTES} bytes"):
        plan_for(kv_cache_memory_bytes=10**9, swap_space=0.0001)


def test_a_swap_space_that_no_memory_has() -> None:
    plan = plan_for(kv_cache_memory_bytes=10**9, swap_space=100)
    with pytest.raises(BackendError, match=r"swap space \(107.4 GB\)"):
        check_memory(plan, Machine(total=50 * 10**9))
    check_memory(replace(plan, num_host_blocks=0), Machine(total=50 * 10**9))


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "recompute"),
        ({"swap_space": 1}, "auto"),
        ({"swap_space": 1, "preemption_mode": "swap"}, "swap"),
        ({"preemption_mode": "recompute"}, "recompute"),
    ],
)
def test_preemption_modes(flags: dict[str, Any], mode: str) -> None:
    config = tiny_config(**flags)
    assert preemption_mode(config) == mode
    costs = PreemptionCosts(1.0, 1.0) if mode == "auto" else None
    plan = plan_for(num_gpu_blocks_override=1000, **flags)
    made = scheduler_config(config, plan, costs)
    assert (made.preemption_mode, made.preemption_costs) == (mode, costs)
    assert made.num_host_blocks == plan.num_host_blocks


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"preemption_mode": "swap"}, "needs a swap_space"),
        ({"preemption_mode": "auto"}, "needs a swap_space"),
        ({"preemption_mode": "recompute", "swap_space": 1}, "would not be used"),
        ({"preemption_mode": "never"}, "not one of recompute, swap, auto"),
        ({"swap_space": -1}, "0 or more GiB"),
        ({"swap_space": float("nan")}, "0 or more GiB"),
        ({"swap_space": float("inf")}, "0 or more GiB"),
        ({"swap_space": "4"}, "must be a number"),
    ],
)
def test_swap_flags_that_cannot_be_honoured(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny_config(**flags)
