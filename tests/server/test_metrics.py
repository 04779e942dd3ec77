from __future__ import annotations

import time
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from rawpaged.engine.stats import EngineLimits, RequestStats, StatsLogger, StepStats
from rawpaged.scheduler.kv_stats import KVStats
from rawpaged.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, PrometheusStats
from tests.server.client import send
from tests.server.conftest import Server

LIMITS = EngineLimits(
    device="cpu",
    dtype="float32",
    cache_dtype="int8",
    weights_bytes=12345,
    num_blocks=100,
    block_size=16,
    max_model_len=1000,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    enable_prefix_caching=True,
)
KV = KVStats(
    num_blocks=100,
    block_size=16,
    num_used_blocks=25,
    num_cached_blocks=15,
    num_block_refs=40,
    num_shared_blocks=5,
    num_used_slots=363,
    num_unfilled_slots=21,
    num_reserved_slots=16,
    num_evictions=7,
    num_host_blocks=20,
    num_used_host_blocks=5,
    num_swapped_requests=2,
    num_preemptions=1,
    num_swap_preemptions=1,
    num_swapped_out_blocks=9,
    num_swapped_in_blocks=4,
    num_block_copies=3,
    num_forks=6,
    prefix_cache_queries=64,
    prefix_cache_hits=48,
)
STEP = StepStats(num_running=3, num_waiting=2, kv=KV, num_prompt_tokens=40, num_generation_tokens=3)
LATER = replace(
    STEP,
    kv=replace(
        KV,
        num_preemptions=2,
        prefix_cache_queries=128,
        prefix_cache_hits=96,
        num_evictions=9,
        num_swapped_in_blocks=5,
        num_forks=8,
        num_block_copies=4,
    ),
)
REQUEST = RequestStats(
    finish_reason="stop",
    num_prompt_tokens=30,
    num_cached_tokens=16,
    num_generation_tokens=7,
    num_preemptions=0,
    queue_seconds=0.25,
    time_to_first_token_seconds=0.5,
    time_per_output_token_seconds=0.125,
    e2e_seconds=2.0,
)
ABORTED = RequestStats(
    finish_reason="abort",
    num_prompt_tokens=30,
    num_cached_tokens=0,
    num_generation_tokens=0,
    num_preemptions=0,
    queue_seconds=None,
    time_to_first_token_seconds=None,
    time_per_output_token_seconds=None,
    e2e_seconds=1.0,
)


def samples(text: str) -> dict[str, float]:
    """Name -> value, with the finish reason appended where there is one; buckets left out."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                assert sample.labels["model_name"] == "m"
                reason = sample.labels.get("finished_reason")
                values[sample.name + (f".{reason}" if reason else "")] = sample.value
    return values


def recorded() -> PrometheusStats:
    stats = PrometheusStats("m")
    logger: StatsLogger = stats
    logger.record_start(LIMITS)
    logger.record_step(STEP)
    logger.record_step(LATER)
    logger.record_first_token(0.5)
    logger.record_inter_token_latency(0.125)
    logger.record_inter_token_latency(0.25)
    logger.record_request(REQUEST)
    logger.record_request(ABORTED)
    return stats


def test_values_under_both_names() -> None:
    values = samples(recorded().render().decode())
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "num_requests_swapped": 2,
        "kv_cache_usage_perc": 0.25,
        "weights_bytes": 12345,
        "kv_blocks": 100,
        "kv_blocks_used": 25,
        "kv_blocks_cached": 15,
        "kv_blocks_free": 60,
        "kv_blocks_shared": 5,
        "kv_block_refs": 40,
        "kv_blocks_saved": 15,
        "cpu_cache_usage_perc": 0.25,
        "kv_slots_used": 363,
        "kv_slots_unfilled": 21,
        "kv_slots_reserved": 16,
        "kv_block_evictions_total": 9,
        "kv_block_copies_total": 4,
        "kv_forks_total": 8,
        "cache_config_info": 1,
        "engine_config_info": 1,
        "prompt_tokens_total": 80,
        "generation_tokens_total": 6,
        "num_preemptions_total": 2,
        "num_swap_preemptions_total": 1,
        "swapped_out_blocks_total": 9,
        "swapped_in_blocks_total": 5,
        "prefix_cache_queries_total": 128,
        "prefix_cache_hits_total": 96,
        "request_success_total.stop": 1,
        "request_success_total.length": 0,
        "request_success_total.abort": 1,
        "request_success_total.error": 0,
        "time_to_first_token_seconds_sum": 0.5,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 0.375,
        "inter_token_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_sum": 0.125,
        "request_time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 3.0,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_sum": 0.25,
        "request_queue_time_seconds_count": 1,
        "request_prompt_tokens_sum": 60,
        "request_prompt_tokens_count": 2,
        "request_generation_tokens_sum": 7,
        "request_generation_tokens_count": 2,
    }
    wanted = {
        f"{prefix}:{name}": v for name, v in expected.items() for prefix in ("rawpaged", "vllm")
    }
    assert values == wanted


def test_the_configuration_is_told_in_labels() -> None:
    text = recorded().render().decode()
    assert (
        'vllm:cache_config_info{block_size="16",cache_dtype="int8",'
        'enable_prefix_caching="True",model_name="m",num_gpu_blocks="100"} 1.0' in text
    )
    assert (
        'rawpaged:engine_config_info{device="cpu",dtype="float32",max_model_len="1000",'
        'max_num_batched_tokens="64",max_num_seqs="8",model_name="m"} 1.0' in text
    )


def test_every_metric_has_help_and_type() -> None:
    text = recorded().render().decode()
    for prefix in ("rawpaged:", "vllm:"):
        for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
            for name in names:
                full_name = prefix + name + ("_total" if kind == "counter" else "")
                assert f"# HELP {full_name} " in text
                assert f"# TYPE {full_name} {kind}\n" in text


def test_instances_share_nothing() -> None:
    recorded()
    assert not any(samples(PrometheusStats("m").render().decode()).values())


def test_route(server: Server) -> None:
    server.stats.record_step(STEP)
    answer = send(server.url, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert b'vllm:num_requests_running{model_name="fake"} 3.0' in answer.body


def test_a_step_costs_little() -> None:
    stats = PrometheusStats("m")
    times = []
    for _ in range(200):
        start = time.perf_counter()
        stats.record_step(STEP)
        times.append(time.perf_counter() - start)
    assert min(times) < 50e-6
