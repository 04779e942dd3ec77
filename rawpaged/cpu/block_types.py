"""GGUF's types of blocks, and how panels hold them.

A weight of a block is scale * (code - zero), or scale * code + minimum: codes are small integers,
scales and minima a block's own. K types have blocks of blocks: eight of 32 share a scale of scales.

A panel of 32 columns is two halves of 16. A half is a row of steps in the order of k; a step is one
block of 32, or eight, of each of its columns:

    f16[16]        scales; of scales in a K type
    f16[16]        minima, where the type has them; of K types negative, and also of minima
    then for each block of 32
    u8 or i8[16]   scale, K types alone; two of them where a block has two groups of 16
    u8[16]         minimum, K types that have them
    u8[64 * bits]  codes

Codes lie as words of four: byte i of column j's word g is for k = 4 * g + i. Types of 8 bits have
eight lines u8[16, 4]. Others have four lines with word 2 * l in the lower halves of bytes and
word 2 * l + 1 in the upper ones; before them lie the bits above the fourth: of 5 bits one line
whose bit g is for word g, of 6 bits two lines of which line h has words 4 * h to 4 * h + 3, two
bits each.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32
"""Weights of a block, and activations that share a scale."""
WORDS = BLOCK // 4
HALF_PANEL = 16
LINE_BYTES = 4 * HALF_PANEL


@dataclass(frozen=True, slots=True)
class BlockType:
    """What tells the types apart."""

    name: str
    bits: int
    """Of a code: 4, 5, 6 or 8."""
    zero: int = 0
    """The code of weight 0: a power of two, or 0 where there are minima."""
    has_minima: bool = False
    blocks_per_step: int = 1
    """Eight for K types."""
    groups: int = 1
    """Scales of a block."""

    @property
    def is_k_type(self) -> bool:
        return self.blocks_per_step > 1

    @property
    def header_bytes(self) -> int:
        return 2 * HALF_PANEL * (1 + self.has_minima)

    @property
    def scale_bytes(self) -> int:
        """Of a block, beside its step's header."""
        return HALF_PANEL * (self.groups + self.has_minima) if self.is_k_type else 0

    @property
    def high_lines(self) -> int:
        """Lines of bits above the fourth."""
        return self.bits - 4 if self.bits < 8 else 0

    @property
    def block_bytes(self) -> int:
        return self.scale_bytes + LINE_BYTES * self.bits

    @property
    def step_bytes(self) -> int:
        return self.header_bytes + self.blocks_per_step * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        """In memory, scales and minima included."""
        return 8 * self.step_bytes / (HALF_PANEL * self.step_size)

    @property
    def step_size(self) -> int:
        """Elements of k in a step."""
        return BLOCK * self.blocks_per_step


BLOCK_TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 4, zero=8),
        BlockType("Q4_1", 4, has_minima=True),
        BlockType("Q5_0", 5, zero=16),
        BlockType("Q5_1", 5, has_minima=True),
        BlockType("Q8_0", 8, zero=128),
        BlockType("Q4_K", 4, has_minima=True, blocks_per_step=8),
        BlockType("Q5_K", 5, has_minima=True, blocks_per_step=8),
        BlockType("Q6_K", 6, zero=32, blocks_per_step=8, groups=2),
    )
}
"""By their names in GGUF; others are dequantised."""
