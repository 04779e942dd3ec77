"""How the memory is divided: weights, workspace, KV pool; and what the pool can hold."""

from __future__ import annotations

from dataclasses import dataclass

from rawpaged.backend import Backend
from rawpaged.config import DEVICE_DTYPES, EngineConfig, PreemptionCosts, SchedulerConfig
from rawpaged.errors import BackendError, ConfigError
from rawpaged.models.config import ModelConfig
from rawpaged.models.llama import workspace_bytes
from rawpaged.weights.sizes import WeightSizes, weight_sizes
from rawpaged.weights.tensors import TensorSource

KV_SHARE = 0.25
"""Share of a CPU's available memory that the pool takes at most when nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The division of memory, in bytes, and the limits that follow from it."""

    dtype: str
    kv_cache_dtype: str
    weights_types: str
    """In words, as in "Q4_1 and Q8_0"."""
    weights_bytes: int
    workspace_bytes: int
    bytes_per_token: int
    """KV of one token over all layers, padding included."""
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    num_host_blocks: int = 0
    """Blocks in host memory, for requests that are swapped out."""

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def swap_bytes(self) -> int:
        """Host memory, which on a CPU is the memory that all else is in."""
        return self.num_host_blocks * self.block_size * self.bytes_per_token

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes + self.kv_bytes

    def paged_requests(self, length: int) -> int:
        """Requests of `length` tokens that the pool holds at once, in whole blocks."""
        return self.num_blocks // -(-length // self.block_size)

    def reserved_requests(self) -> int:
        """Requests that the same memory holds when each reserves max_model_len tokens."""
        return self.num_tokens // self.max_model_len

    def describe(self, mean_lens: tuple[int, ...] = ()) -> str:
        """A few lines for a person; a line for each of the mean request lengths."""
        lines = [
            f"weights      {_size(self.weights_bytes)} as {self.weights_types}",
            f"workspace    {_size(self.workspace_bytes)}",
            f"KV pool      {_size(self.kv_bytes)}: {self.num_blocks} blocks of {self.block_size} "
            f"= {self.num_tokens} tokens, {self.bytes_per_token} bytes a token as "
            f"{self.kv_cache_dtype}",
            *self._describe_swapping(),
            f"requests     {self.paged_requests(self.max_model_len)} of max_model_len="
            f"{self.max_model_len} at once, up to max_num_seqs={self.max_num_seqs} in a step",
        ]
        for length in mean_lens:
            lines.append(
                f"             {self.paged_requests(length)} of {length} tokens, paged; "
                f"{self.reserved_requests()} if each reserved {self.max_model_len}"
            )
        return "\n".join(lines)

    def _describe_swapping(self) -> list[str]:
        if self.num_host_blocks == 0:
            return []
        return [f"swap space   {_size(self.swap_bytes)} of the host: {self.num_host_blocks} blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a dry run of the largest steps has shown, in bytes."""

    others_bytes: int
    """In use before the weights were loaded: other processes', and the driver's own."""
    weights_bytes: int
    workspace_bytes: int
    """Beside weights and KV: activations, arrays of a step, code."""


def is_measured(config: EngineConfig) -> bool:
    """Whether the pool gets what a dry run leaves, rather than what was asked for or estimated."""
    given = config.num_gpu_blocks_override, config.kv_cache_memory_bytes
    return config.device != "cpu" and given == (None, None)


def resolve_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """"auto": the checkpoint's own type where the device computes with it, else bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    return model.dtype if model.dtype in DEVICE_DTYPES[config.device] else "bfloat16"


def resolve_kv_cache_dtype(config: EngineConfig, dtype: str) -> str:
    """"auto": the type of the weights; "fp8": e4m3, as in vLLM."""
    return {"auto": dtype, "fp8": "fp8_e4m3"}.get(config.kv_cache_dtype, config.kv_cache_dtype)


def keeps_quantized(config: EngineConfig) -> bool:
    """Whether weights in blocks stay so, where the device has kernels for them."""
    return config.quantization is not None or config.dtype == "auto"


def resolve_weight_sizes(
    config: EngineConfig, model: ModelConfig, backend: Backend, tensors: TensorSource | None
) -> WeightSizes:
    """What the weights will take; raises ConfigError where none can stay as quantization asks."""
    kept = backend.block_bits if keeps_quantized(config) else {}
    sizes = weight_sizes(model, backend.dtype, tensors, kept)
    if config.quantization is not None and set(sizes.by_type) == {backend.dtype}:
        raise ConfigError(
            f"quantization={config.quantization!r}: {config.model} holds no weights of types "
            f"{', '.join(backend.block_bits)}; leave it out"
        )
    return sizes


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    backend: Backend,
    measured: Measured | None = None,
    sizes: WeightSizes | None = None,
) -> MemoryPlan:
    """Decide the number of blocks and the longest request, from estimates or from measurements.

    `sizes` are those of the weights; None: all of them are of the backend's type.
    Raises ConfigError when a flag asks for more than the model or the memory allows, BackendError
    when the device cannot do it. The memory need not be there if the size of the pool is given.
    """
    # An empty pool costs nothing and shows whether the backend can do blocks of this size.
    backend.new_kv_cache(0, model.num_kv_heads, model.head_dim, config.block_size)
    bytes_per_block = model.num_layers * backend.kv_bytes_per_block(
        model.num_kv_heads, model.head_dim, config.block_size
    )
    wanted_len = config.max_model_len or model.max_position_embeddings
    if wanted_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={wanted_len} is more than the model's "
            f"max_position_embeddings={model.max_position_embeddings}"
        )
    sizes = sizes or weight_sizes(model, backend.dtype)
    weights = sizes.total
    workspace = workspace_bytes(model, backend, config.max_num_batched_tokens, config.max_num_seqs)
    available, total = backend.memory_info()
    if measured is not None:
        available = total - measured.others_bytes
        weights, workspace = measured.weights_bytes, measured.workspace_bytes
    num_blocks = _num_blocks(
        config, (available, total), bytes_per_block, wanted_len, taken=weights + workspace
    )
    pool_len = num_blocks * config.block_size
    if config.max_model_len is not None and wanted_len > pool_len:
        raise ConfigError(
            f"max_model_len={wanted_len} does not fit the KV pool of {num_blocks} blocks of "
            f"{config.block_size} = {pool_len} tokens; lower it, or give more memory with "
            f"kv_cache_memory_bytes (a request that long needs "
            f"{-(-wanted_len // config.block_size) * bytes_per_block} bytes)"
        )
    return MemoryPlan(
        dtype=backend.dtype,
        kv_cache_dtype=backend.kv_cache_dtype,
        weights_types=sizes.describe(),
        weights_bytes=weights,
        workspace_bytes=workspace,
        bytes_per_token=bytes_per_block // config.block_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=min(wanted_len, pool_len),
        max_num_seqs=config.max_num_seqs,
        num_host_blocks=_num_host_blocks(config, bytes_per_block),
    )


def check_memory(plan: MemoryPlan, backend: Backend) -> None:
    """Raises BackendError for a plan that this machine could never hold."""
    _, total = backend.memory_info()
    needed, swap = plan.total_bytes, ""
    if backend.name == "cpu" and plan.num_host_blocks > 0:
        needed += plan.swap_bytes
        swap = f", swap space ({_size(plan.swap_bytes)})"
    if needed > total:
        raise BackendError(
            f"this machine has {_size(total)} of memory; weights ({_size(plan.weights_bytes)}), "
            f"workspace ({_size(plan.workspace_bytes)}){swap} and KV pool "
            f"({_size(plan.kv_bytes)}) take {_size(needed)}"
        )


def scheduler_config(
    config: EngineConfig, plan: MemoryPlan, costs: PreemptionCosts | None = None
) -> SchedulerConfig:
    """The limits the scheduler works under; `costs` are for the preemption mode "auto"."""
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        # A CPU's results do not depend on who computed a block, so all may be shared.
        batch_invariant=config.batch_invariant and config.device != "cpu",
        scheduling_policy=config.scheduling_policy,
        num_watermark_blocks=int(config.watermark * plan.num_blocks),
        num_host_blocks=plan.num_host_blocks,
        preemption_mode=preemption_mode(config),
        preemption_costs=costs,
    )


def preemption_mode(config: EngineConfig) -> str:
    """The mode that was asked for, or that follows from the swap space."""
    return config.preemption_mode or ("auto" if config.swap_space > 0 else "recompute")


def _num_host_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    num_blocks = int(config.swap_space * 2**30) // bytes_per_block
    if config.swap_space > 0 and num_blocks == 0:
        raise ConfigError(
            f"swap_space={config.swap_space} GiB holds no block: one takes {bytes_per_block} bytes"
        )
    return num_blocks


def _num_blocks(
    config: EngineConfig,
    memory_info: tuple[int, int],
    bytes_per_block: int,
    wanted_len: int,
    taken: int,
) -> int:
    if config.num_gpu_blocks_override is not None:
        if config.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_gpu_blocks_override and kv_cache_memory_bytes both give the size of the KV "
                "pool; leave one out"
            )
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} holds no block: "
                f"one takes {bytes_per_block} bytes"
            )
        return num_blocks
    available, total = memory_info
    if config.device == "cpu":
        share = int(KV_SHARE * (available - taken))
    else:
        share = int(config.gpu_memory_utilization * total) - (total - available) - taken
    useful = config.max_num_seqs * -(-wanted_len // config.block_size)
    num_blocks = min(share // bytes_per_block, useful)
    if num_blocks < 1:
        remedy = "" if config.device == "cpu" else (
            f" within gpu_memory_utilization={config.gpu_memory_utilization} of {_size(total)}; "
            "raise that, or lower max_num_batched_tokens or max_num_seqs"
        )
        raise BackendError(
            f"{_size(available)} of memory is available; weights and workspace take "
            f"{_size(taken)} and no KV block fits beside them{remedy}"
        )
    return num_blocks


def _size(num_bytes: int) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000  # type: ignore[assignment]
    return f"{num_bytes:.4g} GB"
