"""What a user may choose about an engine, and what the scheduler works with after resolving it."""

from __future__ import annotations

from dataclasses import dataclass

from rawpaged.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("gguf",)
DEVICES = ("cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("recompute", "swap", "auto")
DEVICE_DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16", "float16")}
"""Types of weights that a device's kernels take."""

_STRINGS = ("model", "device", "dtype", "kv_cache_dtype", "load_format", "scheduling_policy")
_OPTIONAL_STRINGS = (
    "tokenizer",
    "chat_template",
    "revision",
    "quantization",
    "preemption_mode",
)
_INTEGERS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_logprobs", "seed")
_BOOLEANS = ("enable_prefix_caching", "enforce_eager", "batch_invariant")
_OPTIONAL_BOOLEANS = ("async_scheduling",)
_OPTIONAL_INTEGERS = (
    "max_model_len",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "num_threads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The flags of `rawpaged serve` and of `LLM(...)`, under vLLM's names where they mean the same.

    Raises ConfigError on construction for any value that no model could honour; limits that depend
    on the model are checked when it is known (`rawpaged.engine.memory_plan`).
    """

    model: str
    """Directory, GGUF file, hub id, or the built-in name `smollm2-135m`."""
    tokenizer: str | None = None
    """Directory or tokenizer.json to use instead of the checkpoint's own."""
    chat_template: str | None = None
    """Jinja text, or a file holding it, to use instead of the checkpoint's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    device: str = "cpu"
    dtype: str = "auto"
    """Type of weights: bfloat16 or float32 on a CPU, bfloat16 or float16 on a GPU; sums are
    float32 on both. auto: that of the checkpoint where the device has it, else bfloat16; on a CPU
    quantised weights of a GGUF file stay as they are."""
    quantization: str | None = None
    """gguf: quantised weights of a GGUF file stay as they are whatever dtype says (of the others
    and of the KV cache). None: they do with dtype="auto" on a CPU, else they are dequantised."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache. auto: that of the weights; fp8 is fp8_e4m3. Types of one byte have a
    scale for each KV head, from the checkpoint or by calibration (docs/kv-cache.md)."""
    load_format: str = "auto"
    max_model_len: int | None = None
    """Longest request in tokens, prompt and output; None: what the model and the pool allow."""
    block_size: int = 16
    """Tokens a KV block holds."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks (vLLM's name; it counts blocks of whichever device is used)."""
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, workspace and KV pool together."""
    enforce_eager: bool = False
    """Capture no decode steps to replay them later: no CUDA graphs on a GPU; on a CPU each step is
    recorded anew, and not once for its batch size."""
    batch_invariant: bool = False
    """Results that do not depend on other requests, chunks, caches and preemption, bit for bit.
    On a CPU they never do; on a GPU it costs a little (docs/gpu.md)."""
    async_scheduling: bool | None = None
    """Launch a step before the tokens of the one before are known, so that a GPU need not wait for
    the host. None: on a GPU; a CPU has no time that this would save (docs/scheduling.md)."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step; longer prompts are prefilled in chunks."""
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    """Who is served first: "fcfs", whoever came first, or "priority", lower values first."""
    watermark: float = 0.01
    """Share of the KV blocks that no request is started with while others run, which will need
    more."""
    preemption_mode: str | None = None
    """What becomes of requests that must give up their KV blocks: "recompute" them, "swap" the
    blocks to host memory, or "auto", what was faster at the start. None: auto with a swap space."""
    swap_space: float = 0
    """GiB of host memory for blocks that are swapped out."""
    max_logprobs: int = 20
    num_threads: int | None = None
    """CPU threads for kernels; None: the processors this process may use."""
    seed: int = 0
    """Seeds `load_format="dummy"` weights. Requests carry seeds of their own."""

    def __post_init__(self) -> None:
        self._check_types()
        for name, value, allowed in (
            ("device", self.device, DEVICES),
            ("dtype", self.dtype, DTYPES),
            ("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("load_format", self.load_format, LOAD_FORMATS),
            ("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES),
        ):
            if value == "fp8_e5m2":
                raise ConfigError(
                    f"{name}='fp8_e5m2' is not supported: with a scale for each head, fp8_e4m3 has "
                    "range enough and twice the precision; say kv_cache_dtype='fp8_e4m3'"
                )
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization={self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}"
            )
        for name in (
            "max_model_len",
            "block_size",
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
            if value is not None and value >= 2**63:
                raise ConfigError(f"{name}={value} is more than any machine has")
        if (self.num_gpu_blocks_override or 0) >= 2**31:
            raise ConfigError(
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} must be below 2**31"
            )
        for name in ("max_logprobs", "seed"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name}={value} must not be negative")
        if not self.model:
            raise ConfigError("model is empty")
        if self.seed != 0 and self.load_format != "dummy":
            raise ConfigError(
                f"seed={self.seed} is for load_format='dummy'; requests carry seeds of their own"
            )
        if self.quantization is not None and self.load_format == "dummy":
            raise ConfigError(
                f"quantization={self.quantization!r} keeps the weights of a file, and "
                "load_format='dummy' reads none; leave one out"
            )
        self._check_device()
        self._check_swapping()

    def _check_device(self) -> None:
        """What one device has and the other has not."""
        if self.quantization is not None and self.device != "cpu":
            raise ConfigError(
                f"quantization={self.quantization!r} is for device='cpu': on a GPU the weights of "
                "GGUF files are dequantised; leave it out"
            )
        if self.dtype != "auto" and self.dtype not in DEVICE_DTYPES[self.device]:
            raise ConfigError(
                f"dtype={self.dtype!r} is not one of {', '.join(DEVICE_DTYPES[self.device])}, "
                f"which device={self.device!r} computes with"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]"
            )
        if self.device == "cpu" and self.gpu_memory_utilization != 0.9:
            raise ConfigError(
                "gpu_memory_utilization is for device='cuda'; give kv_cache_memory_bytes"
            )
        if self.device == "cpu" and self.async_scheduling:
            raise ConfigError(
                "async_scheduling=True is for device='cuda': on a CPU a step is over when its "
                "launch returns, and nothing would overlap; leave it out"
            )
        if self.device == "cuda" and self.num_threads is not None:
            raise ConfigError("num_threads is for device='cpu'")

    def _check_swapping(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark} must be in [0, 1)")
        if not 0.0 <= self.swap_space < 2.0**30:
            raise ConfigError(f"swap_space={self.swap_space} must be 0 or more GiB")
        if self.preemption_mode not in (None, *PREEMPTION_MODES):
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} is not one of "
                f"{', '.join(PREEMPTION_MODES)}"
            )
        if self.preemption_mode in ("swap", "auto") and self.swap_space == 0:
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} needs a swap_space; say how many GiB"
            )
        if self.preemption_mode == "recompute" and self.swap_space > 0:
            raise ConfigError(
                f"swap_space={self.swap_space} would not be used with preemption_mode='recompute'"
            )

    def _check_types(self) -> None:
        for names, kinds, words in (
            (_STRINGS, (str,), "a string"),
            (_OPTIONAL_STRINGS, (str, type(None)), "a string or None"),
            (_INTEGERS, (int,), "an integer"),
            (_OPTIONAL_INTEGERS, (int, type(None)), "an integer or None"),
            (_BOOLEANS, (bool,), "true or false"),
            (_OPTIONAL_BOOLEANS, (bool, type(None)), "true, false or None"),
            (("gpu_memory_utilization", "swap_space", "watermark"), (int, float), "a number"),
        ):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                    raise ConfigError(f"{name}={value!r} must be {words}")


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What the two ways of preempting cost on this machine with this model."""

    block_copy_seconds: float
    """To copy one KV block of all layers to the host, or back."""
    token_seconds: float
    """To compute one token of a prompt again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits the scheduler works under, all resolved: `max_model_len` fits the pool."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    batch_invariant: bool = False
    """Whether blocks that hold generated tokens are kept out of the prefix cache."""
    num_watermark_blocks: int = 0
    """KV blocks that are left free when a request starts beside others."""
    num_host_blocks: int = 0
    """KV blocks in host memory, for requests that are swapped out."""
    preemption_mode: str = "recompute"
    preemption_costs: PreemptionCosts | None = None
    """For the mode "auto"."""

    def __post_init__(self) -> None:
        self._check_preemption()
        for name in (
            "num_blocks",
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ConfigError(
                f"max_model_len={self.max_model_len} does not fit the KV pool of {self.num_blocks} "
                f"blocks of {self.block_size} tokens; lower it or give the pool more memory"
            )

    def _check_preemption(self) -> None:
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} is not one of "
                f"{', '.join(PREEMPTION_MODES)}"
            )
        if (self.preemption_mode == "recompute") != (self.num_host_blocks == 0):
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} and num_host_blocks="
                f"{self.num_host_blocks} exclude each other"
            )
        if (self.preemption_mode == "auto") != (self.preemption_costs is not None):
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} and preemption_costs="
                f"{self.preemption_costs} exclude each other"
            )
