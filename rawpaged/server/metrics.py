"""Engine statistics as Prometheus metrics, under `rawpaged:` names and under vLLM's."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rawpaged.engine.stats import EngineLimits, RequestStats, StepStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "rawpaged:"
VLLM_PREFIX = "vllm:"
FINISH_REASONS = ("stop", "length", "abort", "error")

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5))
TOKENS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))

GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be scheduled.",
    "num_requests_swapped": "Of those, the ones whose KV blocks are in host memory.",
    "weights_bytes": "Bytes of the weights as the engine was started.",
    "kv_cache_usage_perc": "Share of the KV blocks held by requests, from 0 to 1.",
    "kv_blocks": "KV blocks of the pool.",
    "kv_blocks_used": "KV blocks held by at least one request.",
    "kv_blocks_cached": "KV blocks held by none and kept for prefix hits.",
    "kv_blocks_free": "KV blocks that hold nothing.",
    "kv_blocks_shared": "KV blocks held by more than one request.",
    "kv_block_refs": "Entries of all block tables: KV blocks used if nothing were shared.",
    "kv_blocks_saved": "KV blocks that sharing saves: references less blocks used.",
    "cpu_cache_usage_perc": "Share of the swap space's blocks that are held, from 0 to 1.",
    "kv_slots_used": "Token slots of used KV blocks that hold a token.",
    "kv_slots_unfilled": "Other token slots of KV blocks that hold one: internal fragmentation.",
    "kv_slots_reserved": "Token slots of used KV blocks that hold none yet.",
}
INFO = {
    "cache_config_info": "The KV pool, as labels.",
    "engine_config_info": "Device and limits of the engine, as labels.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Requests preempted.",
    "num_swap_preemptions": "Of those, the ones whose KV blocks were copied to the host.",
    "swapped_out_blocks": "KV blocks copied to the host.",
    "swapped_in_blocks": "KV blocks copied back from the host.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "kv_block_evictions": "Cached KV blocks given away.",
    "kv_block_copies": "KV blocks copied because one of several owners was to write to them.",
    "kv_forks": "Requests that began with the KV blocks of another one.",
}
KV_TOTALS = {
    "num_preemptions": "num_preemptions",
    "num_swap_preemptions": "num_swap_preemptions",
    "swapped_out_blocks": "num_swapped_out_blocks",
    "swapped_in_blocks": "num_swapped_in_blocks",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "kv_block_evictions": "num_evictions",
    "kv_block_copies": "num_block_copies",
    "kv_forks": "num_forks",
}
"""Counters that follow a total of KVStats."""
REQUEST_SUCCESS = ("request_success", "Requests ended, by reason.")
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a request.", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time of a request's later tokens.", SECONDS),
    "e2e_request_latency_seconds": ("Arrival to end.", SECONDS),
    "request_queue_time_seconds": ("Arrival to first scheduled.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", TOKENS),
}


class PrometheusStats:
    """A StatsLogger with a registry of its own.

    Values are kept once; the second set of names is made when they are read, so that a step costs
    the engine's thread a dozen additions.
    """

    def __init__(self, model_name: str) -> None:
        own = CollectorRegistry()
        label = {"model_name": model_name}
        self._gauges = {
            name: Gauge(PREFIX + name, text, label, registry=own).labels(**label)
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, label, registry=own).labels(**label)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, label, buckets=buckets, registry=own).labels(
                **label
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        name, text = REQUEST_SUCCESS
        ended = Counter(PREFIX + name, text, ("model_name", "finished_reason"), registry=own)
        self._ended = {reason: ended.labels(model_name, reason) for reason in FINISH_REASONS}
        self._totals = dict.fromkeys(KV_TOTALS, 0)
        self._own = own
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self.registry.register(_BothNames(own))

    def record_start(self, limits: EngineLimits) -> None:
        self._show(
            "cache_config_info",
            block_size=limits.block_size,
            cache_dtype=limits.cache_dtype,
            num_gpu_blocks=limits.num_blocks,  # vLLM's name, on any device
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._gauges["weights_bytes"].set(limits.weights_bytes)
        self._show(
            "engine_config_info",
            device=limits.device,
            dtype=limits.dtype,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )

    def record_step(self, stats: StepStats) -> None:
        gauges, kv = self._gauges, stats.kv
        gauges["num_requests_running"].set(stats.num_running)
        gauges["num_requests_waiting"].set(stats.num_waiting)
        gauges["num_requests_swapped"].set(kv.num_swapped_requests)
        gauges["kv_cache_usage_perc"].set(kv.num_used_blocks / kv.num_blocks)
        gauges["kv_blocks"].set(kv.num_blocks)
        gauges["kv_blocks_used"].set(kv.num_used_blocks)
        gauges["kv_blocks_cached"].set(kv.num_cached_blocks)
        gauges["kv_blocks_free"].set(kv.num_free_blocks)
        gauges["kv_blocks_shared"].set(kv.num_shared_blocks)
        gauges["kv_block_refs"].set(kv.num_block_refs)
        gauges["kv_blocks_saved"].set(kv.num_saved_blocks)
        gauges["cpu_cache_usage_perc"].set(kv.num_used_host_blocks / max(1, kv.num_host_blocks))
        gauges["kv_slots_used"].set(kv.num_used_slots)
        gauges["kv_slots_unfilled"].set(kv.num_unfilled_slots)
        gauges["kv_slots_reserved"].set(kv.num_reserved_slots)
        self._counters["prompt_tokens"].inc(stats.num_prompt_tokens)
        self._counters["generation_tokens"].inc(stats.num_generation_tokens)
        for name, field in KV_TOTALS.items():
            total: int = getattr(kv, field)
            self._counters[name].inc(total - self._totals[name])
            self._totals[name] = total

    def record_first_token(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def record_inter_token_latency(self, seconds: float) -> None:
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def record_request(self, stats: RequestStats) -> None:
        self._ended[stats.finish_reason].inc()
        for name, value in (
            ("request_queue_time_seconds", stats.queue_seconds),
            ("request_time_per_output_token_seconds", stats.time_per_output_token_seconds),
            ("e2e_request_latency_seconds", stats.e2e_seconds),
            ("request_prompt_tokens", stats.num_prompt_tokens),
            ("request_generation_tokens", stats.num_generation_tokens),
        ):
            if value is not None:
                self._histograms[name].observe(value)

    def _show(self, name: str, **values: str | int) -> None:
        """A constant 1 whose labels are what is to be told."""
        labels = {"model_name": self._model_name, **{k: str(v) for k, v in values.items()}}
        Gauge(PREFIX + name, INFO[name], labels, registry=self._own).labels(**labels).set(1)

    def render(self) -> bytes:
        """The text that Prometheus scrapes, of the type CONTENT_TYPE."""
        return generate_latest(self.registry)


class _BothNames(Collector):
    """Each metric of a registry under `rawpaged:` and again under `vllm:`."""

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own

    def collect(self) -> Iterable[Metric]:
        metrics = list(self._own.collect())
        for prefix in (PREFIX, VLLM_PREFIX):
            for metric in metrics:
                renamed = Metric(
                    prefix + metric.name.removeprefix(PREFIX), metric.documentation, metric.type
                )
                for sample in metric.samples:
                    # The client library's start times, three series a metric, say nothing here.
                    if not sample.name.endswith("_created"):
                        name = prefix + sample.name.removeprefix(PREFIX)
                        renamed.add_sample(name, sample.labels, sample.value)
                yield renamed
