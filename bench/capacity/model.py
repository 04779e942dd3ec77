"""How long a step takes: OPT-13B on an A100 with 40 GB, by formula.

A step reads all weights once, or multiplies by them for every token, whichever takes longer; it
reads the KV of all tokens before it; prompts also attend within themselves. Numbers of data sheets
are taken at one efficiency, and each sequence costs some time on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder whose weights and KV have two bytes an element."""

    name: str
    num_parameters: float
    num_layers: int
    hidden_size: int
    kv_width: int
    """Elements of one token's keys, or values, in one layer."""
    max_model_len: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.num_parameters

    @property
    def layer_kv_bytes(self) -> int:
        """Of one token's keys, or values, in one layer."""
        return 2 * self.kv_width

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.layer_kv_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU's data sheet, and what of its memory is for KV."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    kv_bytes: int
    host_bytes_per_s: float
    """Between device and host, one way."""
    copy_seconds: float
    """To start one copy between device and host."""


OPT_13B = ModelShape("OPT-13B", 13e9, 40, 5120, 5120, 2048)
A100_40GB = Machine("A100-40GB", 1555e9, 312e12, 12 * 2**30, 25e9, 2e-6)


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of steps.

    `efficiency` and `seconds_per_sequence` put the paper's own vLLM at the paper's own numbers of
    batched requests at its two rates (figure 13, by Little's law); docs/capacity.md has the sums.
    """

    shape: ModelShape = OPT_13B
    machine: Machine = A100_40GB
    efficiency: float = 0.7
    """Share of the data sheet's bandwidth and arithmetic that kernels reach."""
    seconds_per_sequence: float = 0.32e-3
    """Host work for each sequence of a step."""

    def step_seconds(
        self, num_decodes: int, num_context_tokens: float, prompts: Sequence[int] = ()
    ) -> float:
        """A step of `num_decodes` sequences with that many tokens of KV together, and prompts."""
        num_rows = num_decodes + sum(prompts)
        reading = self.shape.weight_bytes / self.machine.bytes_per_s
        multiplying = 2 * self.shape.num_parameters * num_rows / self.machine.flops_per_s
        # Two products of a query with each key before it, causal.
        pairs = sum(length * (length + 1) / 2 for length in prompts)
        attending = 4 * self.shape.num_layers * self.shape.hidden_size * pairs
        on_device = (
            max(reading, multiplying)
            + num_context_tokens * self.shape.kv_bytes_per_token / self.machine.bytes_per_s
            + attending / self.machine.flops_per_s
        ) / self.efficiency
        return on_device + (num_decodes + len(prompts)) * self.seconds_per_sequence

    @property
    def seconds_per_context_token(self) -> float:
        """What one more token of KV adds to a step."""
        per_s = self.machine.bytes_per_s * self.efficiency
        return self.shape.kv_bytes_per_token / per_s

    @property
    def num_kv_slots(self) -> int:
        """Tokens whose KV the memory holds."""
        return self.machine.kv_bytes // self.shape.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class SwapModel:
    """Seconds to move a request between the device and the host, one way; nothing overlaps it.

    Moving costs the bytes over the link, and each copy its start. The paper's system started a
    copy for each block and layer, of keys and of values.
    """

    block_size: int
    shape: ModelShape = OPT_13B
    machine: Machine = A100_40GB
    copies_per_block: int = 2 * OPT_13B.num_layers
    """0: one batched copy for all blocks."""

    def seconds(self, num_tokens: int) -> float:
        """All blocks of a request with that many tokens of KV."""
        num_blocks = -(-num_tokens // self.block_size)
        num_bytes = num_blocks * self.block_size * self.shape.kv_bytes_per_token
        num_copies = max(num_blocks * self.copies_per_block, 1)
        moving = num_bytes / self.machine.host_bytes_per_s
        return moving + num_copies * self.machine.copy_seconds
