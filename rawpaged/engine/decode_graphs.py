"""Decode steps as captured graphs, replayed over static arrays.

A step of one token a request launches some hundred kernels for little work each; a graph launches
them as one. Where a graph costs much to capture there is one for each batch bucket, made at the
start, and a batch is padded to the next bucket with rows that have no request. Where it costs
little there is one for each batch size, made when it is first met.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rawpaged.backend import AttentionPlan, DecodeBatch, StaticPlan, StaticPlans
from rawpaged.models.llama import Llama
from rawpaged.progress import ProgressBar


def graph_buckets(most: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, multiples of 8, and the largest batch there can be."""
    return [bucket for bucket in (1, 2, 4, *range(8, most, 8)) if bucket < most] + [most]


@dataclass(frozen=True, slots=True)
class _Graph:
    plan: StaticPlan
    logits: Any  # f32[bucket, vocab_size]
    replay: Callable[[], None]


class DecodeGraphs:
    """Graphs of one model's decode step; they hold the plans' arrays and use the model's.

    `forward` computes the hidden states of a plan's tokens.
    """

    def __init__(
        self,
        model: Llama,
        plans: StaticPlans,
        forward: Callable[[AttentionPlan], None],
        *,
        capture: Callable[[Callable[[], None]], Callable[[], None]],
        on_demand: bool,
        most_reqs: int,
        progress: bool,
    ) -> None:
        self._model = model
        self._plans = plans
        self._forward = forward
        self._capture_ops = capture
        self._on_demand = on_demand
        self._graphs: dict[int, _Graph] = {}
        if on_demand:
            return
        buckets = graph_buckets(most_reqs)
        # The largest first, so that memory it needs serves the others too.
        hidden = not (progress and sys.stderr.isatty())
        for bucket in ProgressBar(buckets[::-1], desc="capturing decode graphs", disable=hidden):
            self._graphs[bucket] = self._capture(bucket)

    def run(self, batch: DecodeBatch) -> Any:
        """Logits f32[num_reqs, vocab_size] of a decode batch; valid until the next step.

        None if the batch does not fit its graph: the step has to run without.
        """
        num_reqs = len(batch.token_ids)
        graph = self._graphs.get(num_reqs) or self._graph_for(num_reqs)
        if not graph.plan.fill(batch):
            return None
        graph.replay()
        logits = graph.logits
        return logits if len(logits) == num_reqs else logits[:num_reqs]

    def _graph_for(self, num_reqs: int) -> _Graph:
        """For a number of requests that has no graph of its own up to now."""
        if self._on_demand:
            self._graphs[num_reqs] = self._capture(num_reqs)
        return self._graphs[min(bucket for bucket in self._graphs if bucket >= num_reqs)]

    def _capture(self, num_reqs: int) -> _Graph:
        plan = self._plans(num_reqs)
        kept: list[Any] = []

        def step() -> None:
            self._forward(plan.plan)
            kept.append(self._model.compute_logits(plan.plan.logits_rows))

        if not self._on_demand:
            # Once for real: what an op makes when it first meets a shape must not be in the graph.
            step()
        replay = self._capture_ops(step)
        return _Graph(plan, kept[-1], replay)
