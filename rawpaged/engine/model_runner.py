"""Runs the model over one scheduled step and samples from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rawpaged.backend import (
    LARGEST_ELEMENT,
    AttentionPlan,
    Backend,
    BatchMeta,
    KVCache,
    KVScales,
    PagesAhead,
    RunAhead,
)
from rawpaged.engine.decode_graphs import DecodeGraphs
from rawpaged.engine.input_batch import make_batch, make_decode_batch
from rawpaged.engine.kv_scales import calibrate_kv_scales
from rawpaged.engine.launched_step import LaunchedStep, StepResult
from rawpaged.engine.op_recorder import OpRecorder
from rawpaged.engine.prompt_logprobs import prompt_logprobs
from rawpaged.engine.sampler import Sampler
from rawpaged.engine.traced_backend import TracedBackend, TracedRunAhead
from rawpaged.errors import SleepError
from rawpaged.models.config import ModelConfig
from rawpaged.models.llama import Llama
from rawpaged.models.weights import LlamaWeights, map_weights
from rawpaged.request import Request
from rawpaged.scheduler.output import SchedulerOutput
from rawpaged.tracing import Tracer


class ModelRunner:
    """One model with its KV pool. `close()` gives the memory back, `sleep()` lends it out.

    `kv_scales` are those of every layer; a cache of bytes that comes without is calibrated, once.
    `reload_weights` gives the weights once more, for waking from a sleep without them.
    With `async_scheduling` a step may be launched before the tokens of the one before are known,
    if the backend computes while the host goes on.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        kv_scales: Sequence[KVScales] | None = None,
        num_host_blocks: int = 0,
        enforce_eager: bool = False,
        batch_invariant: bool = False,
        async_scheduling: bool = False,
        progress: bool = False,
        reload_weights: Callable[[], LlamaWeights] | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self._ops = backend
        self._tracer = Tracer()
        self._is_recorded = False
        self.block_size = block_size
        self.max_chunk_len = min(max_num_batched_tokens, max_model_len)
        """Most tokens that one request can have in a step."""
        self.sleep_level = 0
        """0: awake; 1: the weights lie in host memory; 2: they are gone."""
        self._resting: LlamaWeights | None = None
        self._reload_weights = reload_weights
        self.kv_scales = kv_scales
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._enforce_eager = enforce_eager
        self._batch_invariant = batch_invariant
        self._async_scheduling = async_scheduling
        self._progress = progress
        self._graphs: DecodeGraphs | None = None
        self._ahead: RunAhead | None = None
        self._pages: PagesAhead | None = None
        self._sampled_rows: dict[str, int] = {}
        """Who had which row in the last sampling that ran ahead."""
        self._allocate(weights)

    def _allocate(self, weights: LlamaWeights) -> None:
        """Buffers, KV pool and graphs around the weights."""
        config, backend = self.config, self.backend
        self.model = Llama(
            config,
            weights,
            backend,
            max_num_tokens=self._max_num_batched_tokens,
            max_logits_rows=self._max_num_seqs,
            max_model_len=self._max_model_len,
        )
        self.model.set_tracer(self._tracer, self._ops)
        self._sampler = Sampler(self._max_num_seqs)
        if self._async_scheduling:
            self._ahead = backend.run_ahead(self._max_num_seqs)
        self.kv_caches = self._new_pool()
        self._pages = backend.pages_ahead(self.kv_caches)
        self.host_kv_caches = [
            backend.new_host_kv_cache(
                self.num_host_blocks, config.num_kv_heads, config.head_dim, self.block_size
            )
            for _ in range(config.num_layers if self.num_host_blocks > 0 else 0)
        ]
        self._prepare_forward()
        plans = None
        if not self._enforce_eager:
            plans = backend.static_plans(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                max_model_len=self._max_model_len,
            )
        if plans is not None:
            self._graphs = DecodeGraphs(
                self.model,
                plans,
                self._decode,
                capture=backend.capture,
                on_demand=backend.captures_on_demand,
                most_reqs=min(self._max_num_seqs, self._max_num_batched_tokens),
                progress=self._progress,
            )

    def _prepare_forward(self) -> None:
        """Op by op where each is to be seen, and as the backend likes it best otherwise."""
        self._forward: Callable[[AttentionPlan], None]
        self._forward = partial(self.model.forward, kv_caches=self.kv_caches)
        if not (self._is_recorded or self._tracer.is_on):
            self._forward = self.backend.prepare(self._forward, self._max_num_batched_tokens)

    def _new_pool(self) -> list[KVCache]:
        """Every layer's cache, whose scales are found first if they are needed."""
        config, backend = self.config, self.backend
        if self.kv_scales is None and backend.kv_cache_dtype in LARGEST_ELEMENT:
            self.kv_scales = calibrate_kv_scales(
                self.model,
                backend,
                block_size=self.block_size,
                max_num_batched_tokens=self._max_num_batched_tokens,
                max_model_len=self._max_model_len,
            )
        shape = (self.num_blocks, config.num_kv_heads, config.head_dim, self.block_size)
        scales: Sequence[KVScales | None] = self.kv_scales or [None] * config.num_layers
        return [backend.new_kv_cache(*shape, each) for each in scales]

    def free(self) -> None:
        """Drop everything but the weights' owner's; the runner can only be closed afterwards."""
        self._graphs = None
        self._ahead = None
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self._sampler = Sampler(self._max_num_seqs)
        self.kv_caches = []
        self.host_kv_caches = []
        if hasattr(self, "model"):
            del self.model
        if hasattr(self, "_forward"):
            del self._forward

    def sleep(self, level: int) -> None:
        """Give back KV pool, buffers and graphs; level 1 keeps the weights in host memory.

        Level 2 drops them too. From a sleep it only goes deeper. On a CPU the weights are in host
        memory anyway. Raises SleepError if they could not be had again.
        """
        assert level in (1, 2), f"{level=}"
        if level <= self.sleep_level:
            return
        if level == 2 and self._reload_weights is None:
            raise SleepError("level 2 drops the weights, and this engine cannot read them again")
        if level == 1:
            backend = self.backend
            self._resting = map_weights(
                self.model.weights, backend.offload_linear, backend.download
            )
        else:
            self._resting = None
        self.free()
        self.sleep_level = level
        self.backend.release_unused()

    def wake_up(self) -> None:
        """Take everything again, KV pool empty; the weights from where `sleep` left them.

        If that fails, it sleeps on as before. Raises what allocating and loading may raise.
        """
        if self.sleep_level == 0:
            return
        try:
            self._allocate(self._weights_again())
        except BaseException:
            self.free()
            raise
        self.sleep_level = 0
        self._resting = None

    def _weights_again(self) -> LlamaWeights:
        backend = self.backend
        if self._resting is not None:
            return map_weights(self._resting, backend.restore_linear, backend.upload)
        assert self._reload_weights is not None, "sleep has refused level 2"
        return self._reload_weights()

    def set_tracer(self, tracer: Tracer, recorder: OpRecorder | None = None) -> None:
        """Tell of phases, layers and ops to `tracer`; ops are wrapped only while it is on.

        With a recorder, decode steps run without graphs, whose replays call no ops.
        """
        self._tracer = tracer
        self._is_recorded = recorder is not None
        ops = self.backend if recorder is None else recorder.ops()
        self._ops = TracedBackend(ops, tracer) if tracer.is_on else ops
        if self.sleep_level == 0:
            self.model.set_tracer(tracer, self._ops)
            self._prepare_forward()

    def execute(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> StepResult:
        """Make the copies, compute KV of all scheduled tokens, and sample.

        The result has a token for each request that samples.
        """
        step = self.launch_forward(output, requests)
        self.launch_sampling(step)
        return self.result(step)

    def launch_forward(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> LaunchedStep:
        """Make the copies, compute KV of all scheduled tokens and the logits to sample from.

        Tokens that are not known yet are those of the last sampling that was launched.
        """
        if self._pages is not None:
            self._pages.begin_step(output.num_reached_blocks)
        self._copy_blocks(output)
        step = LaunchedStep(
            [requests[item.request_id] for item in output.scheduled if item.samples]
        )
        if not output.scheduled:
            return step
        if self._uses_graphs:
            step.logits = self._run_graph(output, requests)
            if step.logits is not None:
                return step
        meta = self._make_batch(output, requests)
        with self._tracer.phase("plan"):
            plan = self._ops.plan(
                meta, num_heads=self.config.num_heads, num_kv_heads=self.config.num_kv_heads
            )
        with self._tracer.phase("forward"):
            self._take_token_ids(plan)
            self._forward(plan)
        step.prompt_logprobs = prompt_logprobs(
            output, meta, requests, self.model, self._ops, self._tracer
        )
        if step.sampling_requests:
            with self._tracer.phase("logits"):
                step.logits = self.model.compute_logits(plan.logits_rows)
        return step

    def launch_sampling(self, step: LaunchedStep) -> None:
        """Sample from the step's logits, by what its requests have said up to now.

        To be called before the next forward pass, and once all tokens before these are known.
        """
        requests = step.sampling_requests
        if not requests:
            step.wait = self._ahead.mark() if self._ahead is not None else None
            return
        with self._tracer.phase("sample"):
            step.sampling = self._sampler.launch(
                self._ops,
                step.logits,
                requests,
                self._traced_ahead if self.runs_ahead else None,
            )
        if self._ahead is not None:
            self._sampled_rows = {each.request_id: row for row, each in enumerate(requests)}

    def result(self, step: LaunchedStep) -> StepResult:
        """What the step has brought; waits for it, but not for what was launched after it."""
        if self.runs_ahead:
            with self._tracer.phase("wait"):
                tokens = step.tokens()
        else:
            tokens = step.tokens()
        if self._pages is not None:
            self._pages.end_step()
        sampled = {
            request.request_id: token
            for request, token in zip(step.sampling_requests, tokens, strict=True)
        }
        return StepResult(sampled, step.prompt_logprobs)

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch_sampling` returns before the tokens are there.

        Not while ops are recorded: what they are called with is looked at.
        """
        return self._ahead is not None and not self._is_recorded

    @property
    def _uses_graphs(self) -> bool:
        """Whether decode steps are replayed; not where tracing would see nothing inside them."""
        opaque = self._is_recorded or (self._tracer.is_on and self.backend.captures_on_demand)
        return self._graphs is not None and not opaque

    def close(self) -> None:
        """Drop the KV pool and the model, and close the backend."""
        self.free()
        self._resting = None
        self._reload_weights = None
        self.backend.close()

    def _take_token_ids(self, plan: AttentionPlan) -> None:
        """Put in those that the last sampling has left on the device."""
        ahead = self._traced_ahead
        if ahead is not None:
            ahead.take_token_ids(plan.token_ids)

    def _decode(self, plan: AttentionPlan) -> None:
        """What a graph holds before the logits."""
        self._take_token_ids(plan)
        self.model.forward(plan, self.kv_caches)

    def _run_graph(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> Any:
        """Logits of a step of one token a request; None if there is no graph for it.

        Where tokens of prompts have kernels of their own, none of them may be among these.
        """
        batch = make_decode_batch(
            output,
            self.block_size,
            self._sampled_rows,
            _prompt_lengths(output, requests) if self._batch_invariant else None,
        )
        if batch is None:
            return None
        assert self._graphs is not None
        with self._tracer.phase("graph"):
            return self._graphs.run(batch)

    @property
    def _traced_ahead(self) -> RunAhead | None:
        if self._ahead is None or not self._tracer.is_on:
            return self._ahead
        return TracedRunAhead(self._ahead, self._tracer)

    def _make_batch(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> BatchMeta:
        meta = make_batch(output, self.block_size, self._sampled_rows)
        if not self._batch_invariant:
            return meta
        prompts = np.array(_prompt_lengths(output, requests), np.int32)
        return replace(meta, num_prompt_tokens=prompts)

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        """What goes to the host first: its blocks may be given to others in this step."""
        device, host = self.kv_caches, self.host_kv_caches
        for name, targets, sources, pairs in (
            ("swap out", host, device, output.swap_out),
            ("swap in", device, host, output.swap_in),
            ("copy blocks", device, device, output.block_copies),
        ):
            if pairs:
                with self._tracer.phase(name):
                    self._ops.copy_blocks(targets, sources, np.array(pairs, np.int64))


def _prompt_lengths(output: SchedulerOutput, requests: Mapping[str, Request]) -> list[int]:
    """Tokens of the scheduled requests' prompts, in order."""
    return [requests[item.request_id].num_prompt_tokens for item in output.scheduled]
