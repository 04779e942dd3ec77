"""The least time of a step of Llama-3-8B on two GPUs, kernel by kernel: `python -m bench.roofline`.

A model, not a measurement. A kernel takes as long as its bytes at the memory's full bandwidth, or
its multiply-adds at the tensor cores' full speed, whichever is longer; every kernel reads its
operands from memory once and writes its results once. Kernels are those of docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rawpaged.gpu.linear import bytes_moved, flops, is_worth_splitting
from rawpaged.gpu.linear_kernels import Epilogue, slice_length
from rawpaged.gpu.tuned import GemmTile, linear_tiles

EAGER_LAUNCH_SECONDS = 30e-6
"""Assumed: a launch out of Python, launcher's checks included."""
GRAPH_LAUNCH_SECONDS = 10e-6
"""Assumed: a whole graph, out of Python."""
GAP_SECONDS = 1e-6
"""Assumed: from the last block of a kernel to the first of the next that depends on it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a data sheet says."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    """Dense bf16 with float32 sums."""
    memory_bytes: float
    sm: int
    num_sms: int


H200 = Gpu("H200", 4.8e12, 989e12, 141e9, 90, 132)
RTX_4090 = Gpu("RTX 4090", 1008e9, 165e12, 24 * 2**30, 89, 128)


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a Llama; weights and KV in two bytes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of a layer's products."""
        heads, hidden = self.num_heads * self.head_dim, self.hidden_size
        qkv = heads + 2 * self.num_kv_heads * self.head_dim
        return {
            "qkv": (qkv, hidden),
            "o": (hidden, heads),
            "gate_up, silu": (2 * self.intermediate_size, hidden),
            "down": (hidden, self.intermediate_size),
        }

    @property
    def weight_bytes(self) -> int:
        """All matrices, the embedding included, which a step reads a few rows of."""
        layer = sum(rows * columns for rows, columns in self.linears.values())
        return 2 * (self.num_layers * layer + 2 * self.vocab_size * self.hidden_size)


LLAMA_3_8B = Model(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` requests, each with `queries` new tokens at the end of `context` tokens."""

    batch: int
    queries: int
    context: int

    @property
    def rows(self) -> int:
        return self.batch * self.queries

    @property
    def name(self) -> str:
        if self.queries == 1:
            return f"decode {self.batch} x {_thousands(self.context)}"
        return f"prefill {_thousands(self.queries)}"


STEPS = (
    *(Step(batch, 1, context) for batch in (1, 8, 64) for context in (1024, 8192)),
    Step(1, 512, 512),
    Step(1, 8192, 8192),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A kernel's work in a whole step, all layers together."""

    name: str
    launches: int
    num_bytes: int
    num_flops: int

    def seconds(self, gpu: Gpu) -> float:
        return max(self.num_bytes / gpu.bytes_per_s, self.num_flops / gpu.flops_per_s)


def parts_of(model: Model, step: Step, gpu: Gpu) -> list[Part]:
    """The kernels of a step; how many launches a product takes depends on the GPU."""
    layers, rows = model.num_layers, step.rows
    parts = []
    for name, (out_features, in_features) in model.linears.items():
        epilogue = Epilogue.SILU_MUL if "silu" in name else Epilogue.STORE
        parts.append(
            Part(
                name,
                layers * linear_launches(gpu, rows, out_features, in_features),
                layers * bytes_moved(rows, out_features, in_features, epilogue=epilogue),
                layers * flops(rows, out_features, in_features),
            )
        )
    vocab, hidden = model.vocab_size, model.hidden_size
    logits = bytes_moved(step.batch, vocab, hidden, out_itemsize=4)
    launches = linear_launches(gpu, step.batch, vocab, hidden)
    norm = rows * hidden * 12 + 4 * hidden  # x and out in T, the residual read and written
    embedding = rows * hidden * 6 + step.batch * hidden * 4
    return [
        *parts,
        Part("lm_head", launches, logits, flops(step.batch, vocab, hidden)),
        _attention(model, step),
        Part("norms", 2 * layers + 1, (2 * layers + 1) * norm, 0),
        Part("rope, KV store", layers, layers * _rope_bytes(model, rows), 0),
        Part("embedding, row gather", 2, embedding, 0),
        Part("sampling", 1, 4 * step.batch * vocab, 0),
    ]


def linear_launches(gpu: Gpu, rows: int, out_features: int, in_features: int) -> int:
    """1, or 2 where a product of few tiles is split over K."""
    tiles = linear_tiles(gpu.sm)
    tile = tiles[min(most for most in tiles if rows <= most)]
    if not isinstance(tile, GemmTile):
        return 1
    ctas = -(-rows // tile.rows) * -(-out_features // tile.columns)
    slices = -(-in_features // slice_length(in_features))
    return 2 if is_worth_splitting(ctas, slices, gpu.num_sms) else 1


def kv_bytes(model: Model, step: Step) -> int:
    """Keys and values of all requests in all layers."""
    per_token = 2 * model.num_kv_heads * model.head_dim * 2
    return model.num_layers * step.batch * step.context * per_token


def step_seconds(parts: Sequence[Part], gpu: Gpu) -> tuple[float, float, float]:
    """Kernels alone, launched as one graph, and launched one by one.

    One by one, the CPU runs ahead of the GPU or the GPU waits for it, whichever is slower.
    """
    kernels = sum(part.seconds(gpu) for part in parts)
    launches = sum(part.launches for part in parts)
    with_gaps = kernels + launches * GAP_SECONDS
    eager = max(with_gaps, launches * EAGER_LAUNCH_SECONDS)
    return kernels, with_gaps + GRAPH_LAUNCH_SECONDS, eager


def render(model: Model, gpu: Gpu) -> str:
    """A Markdown table: kernels by steps in microseconds, then whole steps."""
    columns = [parts_of(model, step, gpu) for step in STEPS]
    rows = [["us", *(step.name for step in STEPS)]]
    for same in zip(*columns, strict=True):
        rows.append([same[0].name, *(_microseconds(part.seconds(gpu)) for part in same)])
    totals = [step_seconds(parts, gpu) for parts in columns]
    labels = ("**all kernels, ms**", "in a graph, ms", "one by one, ms")
    for label, seconds in zip(labels, zip(*totals, strict=True), strict=True):
        rows.append([label, *(f"{1e3 * value:.2f}" for value in seconds)])
    launches = [sum(part.launches for part in parts) for parts in columns]
    rows.append(["launches", *map(str, launches)])
    needs = [(model.weight_bytes + kv_bytes(model, step)) / 1e9 for step in STEPS]
    fits = [need * 1e9 <= gpu.memory_bytes for need in needs]
    needed = (f"{need:.1f}{'' if fit else ' (!)'}" for need, fit in zip(needs, fits, strict=True))
    rows.append(["weights and KV, GB", *needed])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * len(STEPS) + "|", *lines[1:]])


def document() -> str:
    """The tables of docs/roofline.md."""
    return "\n\n".join(f"### {gpu.name}\n\n{render(LLAMA_3_8B, gpu)}" for gpu in (H200, RTX_4090))


def _attention(model: Model, step: Step) -> Part:
    before = step.context - step.queries
    pairs = step.queries * before + step.queries * (step.queries + 1) // 2
    q_and_out = 2 * 2 * step.rows * model.num_heads * model.head_dim
    return Part(
        "attention",
        # Decoding is split over the sequence and reduced.
        model.num_layers * (2 if step.queries == 1 else 1),
        kv_bytes(model, step) + model.num_layers * q_and_out,
        model.num_layers * 4 * model.num_heads * model.head_dim * step.batch * pairs,
    )


def _rope_bytes(model: Model, rows: int) -> int:
    """q, k and v read and written, and the angles' table."""
    elements = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return rows * (2 * 2 * elements + 4 * model.head_dim)


def _thousands(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _microseconds(seconds: float) -> str:
    value = 1e6 * seconds
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


if __name__ == "__main__":
    print(document())
