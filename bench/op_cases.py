"""What `bench ops` runs: each op at a model's shapes, with the bytes and products it comes to.

Bytes are those that an op has to read and write once: weights and KV in their type, activations
in float32, small index arrays left out. Flops count a multiply-add as two, and an exponential,
a division or a root as one. Weights and KV lie in as many copies as it takes to exceed the
caches four times, and calls go through the copies in turn, as a model goes through its layers;
activations are in the caches, as they are when the op before has just written them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bench.machine import last_level_cache_bytes
from bench.probes import Product, known_products
from rawpaged.backend import Backend, QuantizedRows
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.models.config import ModelConfig, RopeConfig
from tests import reference
from tests.cpu.blocks import dequantized, random_rows

Float32 = npt.NDArray[np.float32]

SMOLLM2_135M = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=100000.0),
    tie_word_embeddings=True,
    dtype="bfloat16",
)
"""The built-in model's shapes, so that its file need not be there."""

_CHECKED_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Prepared:
    """An op ready to run."""

    calls: Sequence[Callable[[], object]]
    """The same work on different copies of what is to come from memory."""
    check: Callable[[], None]
    """Runs the first call and compares with float64 NumPy; raises AssertionError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One op at one shape."""

    op: str
    name: str
    rows: int
    context: int | None = None
    num_bytes: int
    num_flops: int
    stored: bool = False
    """Whether weights or KV take part, so that their type matters."""
    product: Product = "multiply_add"
    """What the backend multiplies with, where it has it."""
    prepare: Callable[[Backend, np.random.Generator], Prepared]


def item_bytes(dtype: str) -> int:
    """Bytes of one stored weight."""
    return 2 if dtype == "bfloat16" else 4


def product_of(dtype: str) -> Product:
    """What weights or KV of a type are multiplied with."""
    wanted: Product = "byte_dot" if dtype in BLOCK_TYPES else "multiply_add"
    if dtype == "bfloat16":
        wanted = "bfloat16_dot"
    return wanted if wanted in known_products() else "multiply_add"


def stored(x: Float32, dtype: str) -> Float32:
    """x as it comes back out of memory of that type."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else x


def normal(rng: np.random.Generator, *shape: int) -> Float32:
    """Standard normal values."""
    return rng.standard_normal(shape, np.float32)


def cold_copies(num_bytes: int) -> int:
    """Copies of that many bytes that together exceed the caches four times."""
    return max(1, -(-4 * last_level_cache_bytes() // num_bytes))


def dense_cases(model: ModelConfig, rows: int, dtype: str) -> list[OpCase]:
    """Linear layers, the embedding and all ops on activations alone."""
    hidden = model.hidden_size
    return [
        *(_linear(name, rows, *shape, dtype) for name, shape in _linear_shapes(model).items()),
        _embed(rows, hidden, model.vocab_size, dtype),
        _rms_norm(rows, hidden, model.rms_norm_eps),
        _add_rms_norm(rows, hidden, model.rms_norm_eps),
        _silu_and_mul(rows, model.intermediate_size),
        _gather_rows(rows, hidden),
    ]


def quantized_cases(model: ModelConfig, rows: int, type_name: str) -> list[OpCase]:
    """Linear layers of one of BLOCK_TYPES, those whose rows are whole blocks."""
    return [
        _quantized_linear(name, rows, *shape, type_name)
        for name, shape in _linear_shapes(model).items()
        if shape[0] % BLOCK_TYPES[type_name].step_size == 0
    ]


def _linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Features in and out of a layer's products and the last one."""
    hidden, heads = model.hidden_size, model.num_heads
    return {
        "qkv_proj": (hidden, (heads + 2 * model.num_kv_heads) * model.head_dim),
        "o_proj": (heads * model.head_dim, hidden),
        "gate_up_proj": (hidden, 2 * model.intermediate_size),
        "down_proj": (model.intermediate_size, hidden),
        "lm_head": (hidden, model.vocab_size),
    }


def _linear(name: str, rows: int, in_features: int, out_features: int, dtype: str) -> OpCase:
    weight_bytes = item_bytes(dtype) * in_features * out_features

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        # Rounded, as activations may be before they are multiplied.
        x = stored(normal(rng, rows, in_features), "bfloat16")
        weight = normal(rng, out_features, in_features)
        out = backend.empty((rows, out_features), "float32")
        copies = [backend.pack_linear(weight, None) for _ in range(cold_copies(weight_bytes))]

        def check() -> None:
            backend.linear(out, x, copies[0])
            columns = np.unique(
                [0, out_features - 1, *rng.integers(0, out_features, _CHECKED_COLUMNS)]
            )
            expected = reference.linear(x, stored(weight[columns], dtype), None)
            np.testing.assert_allclose(
                out[:, columns], expected, rtol=1e-5, atol=1e-5 * in_features**0.5
            )

        return Prepared([partial(backend.linear, out, x, copy) for copy in copies], check)

    return _linear_case(name, rows, in_features, out_features, dtype, weight_bytes, prepare)


def _quantized_linear(
    name: str, rows: int, in_features: int, out_features: int, type_name: str
) -> OpCase:
    weight_bytes = int(BLOCK_TYPES[type_name].bits_per_weight * in_features * out_features / 8)

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        x = normal(rng, rows, in_features)
        blocks = random_rows(rng, type_name, out_features, in_features)
        parts = [QuantizedRows(type_name, blocks)]
        out = backend.empty((rows, out_features), "float32")
        copies = [backend.pack_quantized(parts, None) for _ in range(cold_copies(weight_bytes))]

        def check() -> None:
            backend.linear(out, x, copies[0])
            columns = np.unique(
                [0, out_features - 1, *rng.integers(0, out_features, _CHECKED_COLUMNS)]
            )
            weight = dequantized(blocks[columns], type_name)
            difference = out[:, columns] - reference.linear(x, weight, None)
            # x is rounded to steps of at most 1/127 of a row's largest; this is seven deviations.
            steps = np.abs(x).max(axis=1)[:, None] / 127
            most = 2 * steps * np.linalg.norm(weight, axis=1)
            assert (np.abs(difference) <= most).all(), f"off by {np.abs(difference).max()}"

        return Prepared([partial(backend.linear, out, x, copy) for copy in copies], check)

    return _linear_case(name, rows, in_features, out_features, type_name, weight_bytes, prepare)


def _linear_case(
    name: str,
    rows: int,
    in_features: int,
    out_features: int,
    dtype: str,
    weight_bytes: int,
    prepare: Callable[[Backend, np.random.Generator], Prepared],
) -> OpCase:
    return OpCase(
        op="linear",
        name=name,
        rows=rows,
        num_bytes=weight_bytes + 4 * rows * (in_features + out_features),
        num_flops=2 * rows * in_features * out_features,
        stored=True,
        product=product_of(dtype),
        prepare=prepare,
    )


def _embed(rows: int, hidden: int, vocab_size: int, dtype: str) -> OpCase:
    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        weight = normal(rng, vocab_size, hidden)
        table = backend.pack_linear(weight, None)
        out = backend.empty((rows, hidden), "float32")
        # Other rows of one table each time, as with a model's own.
        sets = rng.integers(0, vocab_size, (1 + 4096 // rows, rows)).astype(np.int32)

        def check() -> None:
            backend.embed(out, sets[0], table)
            np.testing.assert_array_equal(out, stored(weight[sets[0]], dtype))

        return Prepared([partial(backend.embed, out, ids, table) for ids in sets], check)

    return OpCase(
        op="embed",
        name="embed",
        rows=rows,
        num_bytes=rows * hidden * (item_bytes(dtype) + 4),
        num_flops=0,
        stored=True,
        prepare=prepare,
    )


def _rms_norm(rows: int, hidden: int, eps: float) -> OpCase:
    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        x, weight = normal(rng, rows, hidden), normal(rng, hidden)
        out = backend.empty((rows, hidden), "float32")

        def call() -> None:
            backend.rms_norm(out, x, weight, eps)

        def check() -> None:
            call()
            expected = reference.rms_norm(x, weight, eps)
            np.testing.assert_allclose(out, expected, rtol=5e-6, atol=1e-6)

        return Prepared([call], check)

    return OpCase(
        op="rms_norm",
        name="rms_norm",
        rows=rows,
        num_bytes=4 * (2 * rows * hidden + hidden),
        num_flops=4 * rows * hidden,
        prepare=prepare,
    )


def _add_rms_norm(rows: int, hidden: int, eps: float) -> OpCase:
    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        x, residual = normal(rng, rows, hidden), normal(rng, rows, hidden)
        weight = normal(rng, hidden)
        out = backend.empty((rows, hidden), "float32")

        def call() -> None:
            backend.add_rms_norm(out, x, residual, weight, eps)

        def check() -> None:
            expected = x + residual
            call()
            np.testing.assert_array_equal(residual, expected)
            expected = reference.rms_norm(expected, weight, eps)
            np.testing.assert_allclose(out, expected, rtol=5e-6, atol=1e-6)

        return Prepared([call], check)

    return OpCase(
        op="add_rms_norm",
        name="add_rms_norm",
        rows=rows,
        num_bytes=4 * (4 * rows * hidden + hidden),
        num_flops=5 * rows * hidden,
        prepare=prepare,
    )


def _silu_and_mul(rows: int, size: int) -> OpCase:
    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        gate_up = normal(rng, rows, 2 * size)
        out = backend.empty((rows, size), "float32")

        def call() -> None:
            backend.silu_and_mul(out, gate_up)

        def check() -> None:
            call()
            np.testing.assert_allclose(out, reference.silu_and_mul(gate_up), rtol=5e-6, atol=1e-30)

        return Prepared([call], check)

    return OpCase(
        op="silu_and_mul",
        name="silu_and_mul",
        rows=rows,
        num_bytes=4 * 3 * rows * size,
        num_flops=5 * rows * size,
        prepare=prepare,
    )


def _gather_rows(rows: int, hidden: int) -> OpCase:
    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        x, out = normal(rng, rows, hidden), backend.empty((rows, hidden), "float32")
        picks = rng.permutation(rows).astype(np.int32)

        def call() -> None:
            backend.gather_rows(out, x, picks)

        def check() -> None:
            call()
            np.testing.assert_array_equal(out, x[picks])

        return Prepared([call], check)

    return OpCase(
        op="gather_rows",
        name="gather_rows",
        rows=rows,
        num_bytes=4 * 2 * rows * hidden,
        num_flops=0,
        prepare=prepare,
    )
