"""How much the GPU suite runs: all of it on a GPU, a little of it in the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from bench.roofline import LLAMA_3_8B, Model, Step
from rawpaged.gpu.tuned import FewRowsTile, GemmTile, LinearTile

FEW_ROWS = tuple(
    FewRowsTile(rows, groups, stages)
    for rows in (8, 16, 32)
    for groups, stages in ((1, 2), (1, 3), (2, 2), (2, 3))
)
MANY_ROWS = (
    GemmTile(64, 64, 64, 4, 2, 2),
    GemmTile(64, 128, 32, 4, 2, 4),
    GemmTile(64, 128, 64, 3, 2, 4),
    GemmTile(128, 64, 64, 3, 4, 2),
    GemmTile(128, 128, 32, 4, 2, 4),
    GemmTile(128, 128, 32, 4, 4, 4),
    GemmTile(128, 128, 64, 3, 2, 4),
    GemmTile(128, 128, 64, 3, 4, 4),
)
"""None of them spills with NVRTC 13.5 on sm_80, sm_89 and sm_90a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Shapes and limits of all stages."""

    model: Model
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    groups: tuple[int, ...]
    """Query heads a KV head."""
    byte_steps: tuple[Step, ...]
    """Decode over caches of bytes."""
    prefills: tuple[Step, ...]
    matmul_rows: tuple[int, ...]
    tile_rows: tuple[int, ...]
    tiles: tuple[LinearTile, ...]
    """Candidates for gpu/tuned.py."""
    row_counts: tuple[int, ...]
    """Of the ops on activations and of sampling."""
    step_batches: tuple[int, ...]
    step_context: int
    block_copies: tuple[int, ...]
    """KV blocks at a time, of all layers."""
    graph_launches: int
    copy_bytes: int
    seconds: float
    """Of timing, a case."""
    checks_all: bool
    """Both types, all tiny models, tens of thousands of draws; else a few."""


FULL = Sizes(
    model=LLAMA_3_8B,
    decode_batches=(1, 4, 16, 64, 256),
    decode_contexts=(128, 1024, 4096, 32768),
    groups=(1, 4, 8),
    byte_steps=tuple(Step(batch, 1, context) for context in (4096, 32768) for batch in (1, 16, 64)),
    prefills=(
        Step(1, 512, 512),
        Step(1, 2048, 2048),
        Step(1, 8192, 8192),
        Step(8, 1024, 1024),
        Step(1, 512, 8192),
    ),
    matmul_rows=(1, 2, 4, 8, 16, 32, 128, 512, 2048),
    tile_rows=(8, 16, 32, 64, 256, 2048),
    tiles=(*FEW_ROWS, *MANY_ROWS),
    row_counts=(1, 8, 64, 2048),
    step_batches=(1, 8, 64),
    step_context=1024,
    block_copies=(1, 16, 256),
    graph_launches=300,
    copy_bytes=1 << 30,
    seconds=0.1,
    checks_all=True,
)
REDUCED = Sizes(
    model=Model(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
    ),
    decode_batches=(1, 3),
    decode_contexts=(40, 300),
    groups=(1, 4, 8),
    byte_steps=(Step(2, 1, 40),),
    prefills=(Step(1, 24, 24), Step(2, 8, 40)),
    matmul_rows=(1, 8, 40),
    tile_rows=(8, 40),
    tiles=(FewRowsTile(8, 1, 3), GemmTile(64, 64, 64, 4, 2, 2)),
    row_counts=(1, 4),
    step_batches=(1, 3),
    step_context=40,
    block_copies=(1, 3),
    graph_launches=5,
    copy_bytes=1 << 16,
    seconds=0.0,
    checks_all=False,
)
