"""The engine: token ids in, token ids out, one step at a time.

Knows nothing of text, threads or HTTP. `rawpaged.engine.engine_thread` drives it.
"""

from __future__ import annotations

import time
from itertools import zip_longest

from rawpaged.config import SchedulerConfig
from rawpaged.engine.beam_groups import BeamGroups
from rawpaged.engine.engine_output import EngineOutput
from rawpaged.engine.launched_step import StepResult
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.engine.op_recorder import OpRecorder
from rawpaged.engine.request_progress import RequestProgress
from rawpaged.engine.sampler import NO_TOKEN, PositionLogprobs
from rawpaged.engine.sleeping import check_may_sleep, wake_up
from rawpaged.engine.stats import StatsLogger
from rawpaged.engine.step_label import step_args, step_label
from rawpaged.engine.step_recorder import StepRecorder
from rawpaged.engine.step_run import StepRun
from rawpaged.request import FinishReason, Request, RequestGroup
from rawpaged.scheduler.scheduler import Scheduler
from rawpaged.tracing import Tracer


class Engine:
    """Schedule, run, update. Not thread-safe; `step` blocks while the model runs.

    Where the runner runs ahead, the forward pass of a step is launched before the tokens of the
    step before are waited for (docs/scheduling.md#steps-that-overlap).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: ModelRunner,
        stats_logger: StatsLogger | None = None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.runner = runner
        self.tracer = Tracer()
        self._stats_logger = stats_logger
        self._requests: dict[str, Request] = {}
        self._progress: dict[str, RequestProgress] = {}
        self._under_way: StepRun | None = None
        """A step of which everything is launched, and nothing is known yet."""
        self._beams = BeamGroups(self.scheduler)
        self._recorder = StepRecorder(
            self.scheduler,
            runner.backend,
            stats_logger,
            weights_bytes=runner.model.weights.nbytes,
        )

    def set_tracer(self, tracer: Tracer, recorder: OpRecorder | None = None) -> None:
        """Tell of everything that happens in a step to `tracer`, of ops' calls to `recorder`.

        To be called between steps.
        """
        self.tracer = tracer
        self.runner.set_tracer(tracer, recorder)

    def bind_thread(self) -> None:
        """To be called once by the thread that will run steps, if it is not the one that loaded."""
        self.runner.backend.bind_thread()

    def add_request(self, request: Request) -> None:
        """Queue a request that has no siblings, as `add_group` does."""
        self.add_group(request.group)

    def add_group(self, group: RequestGroup) -> None:
        """Queue requests; raises InvalidRequestError if one could never run to its end."""
        self.scheduler.add(group)
        for request in group.requests:
            self._requests[request.request_id] = request
            self._progress[request.request_id] = RequestProgress(request, self._stats_logger)
        if group.lockstep:
            self._beams.add(group)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_unfinished() or self._under_way is not None

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> EngineOutput | None:
        """End a request between steps, a beam with its whole search; None if it has ended."""
        return self._end(request_id, reason, stop_reason)

    def step(self) -> list[EngineOutput]:
        """Launch a step and bring one to its end, the one before where steps overlap.

        Outputs are of the requests that got a token or ended in what came to its end.
        """
        before, self._under_way = self._under_way, None
        step = self._launch_forward()
        outputs = [] if before is None else self._complete(before)
        if step is None:
            return outputs
        if before is not None and before.failure is not None:
            # Its tokens and its KV are what this step computes with.
            step.fail(before.failure)
        step.launch_sampling()
        if step.failure is None:
            self.scheduler.advance(step.output)
            if self._may_overlap(step):
                self._under_way = step
                return outputs
        return outputs + self._complete(step)

    def _launch_forward(self) -> StepRun | None:
        """Of the next step; None if nothing can run."""
        with self.tracer.phase("schedule"):
            scheduled = self.scheduler.schedule()
        requests = {name: self._requests[name] for name in scheduled.request_ids}
        if not requests:
            return None
        if self.tracer.is_on and scheduled.scheduled:
            self.tracer.describe_step(
                step_label(scheduled, requests), step_args(scheduled, requests)
            )
        step = StepRun(self.runner, scheduled, requests)
        now = time.monotonic()
        for item in scheduled.scheduled:
            self._progress[item.request_id].note_scheduled(now)
        step.launch_forward()
        return step

    def _may_overlap(self, step: StepRun) -> bool:
        """Whether the next step can be scheduled without knowing what this one brings.

        Not if beams are in it, for what they sample decides which blocks they go on with.
        """
        return self.runner.runs_ahead and not any(
            request.group.lockstep for request in step.requests.values()
        )

    def _complete(self, step: StepRun) -> list[EngineOutput]:
        """Wait for the step's tokens, append them, end what has ended."""
        result = step.result()
        if result is None:
            return self._fail(step)
        with self.tracer.phase("update"):
            return self._update(step, result)

    @property
    def sleep_level(self) -> int:
        """0: awake; 1: asleep, weights in host memory; 2: asleep without weights."""
        return self.runner.sleep_level

    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`: see ModelRunner.sleep; the prefix cache is emptied.

        Raises SleepError while there are requests, InvalidRequestError for another level than 1
        and 2.
        """
        check_may_sleep(level, len(self._requests))
        self._abandon()
        self.scheduler.reset_prefix_cache()
        self.runner.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again; answers are what they were. Awake, it does nothing.

        Raises BackendError or CheckpointError if that fails; then the engine is still asleep.
        """
        wake_up(self.runner)

    def close(self) -> None:
        """Free the model and the KV pool. Requests must have been finished before."""
        try:
            self._abandon()
        finally:
            self.runner.close()

    def _abandon(self) -> None:
        """Wait for the step under way, whose requests have ended: it uses what is to be freed."""
        step, self._under_way = self._under_way, None
        if step is not None:
            step.result()

    def record_idle(self) -> None:
        """Bring the gauges up to date when nothing runs."""
        self._recorder.record_idle()

    def _update(self, step: StepRun, result: StepResult) -> list[EngineOutput]:
        """Append the tokens, end what has ended, count."""
        tokens = {request_id: token.token_id for request_id, token in result.sampled.items()}
        outputs = self._fail_broken(step, result) if NO_TOKEN in tokens.values() else []
        self._keep_prompt_logprobs(step, result)
        finished = self.scheduler.complete(tokens)
        outputs += self._token_outputs(step, result)
        outputs += self._advance_beams(step, result)
        for request in finished:
            self._forget(request)
        self._recorder.record_step()
        return outputs

    def _is_unfinished(self, step: StepRun, request_id: str) -> bool:
        """Whether the step's request of that name has not ended since, whoever has it now."""
        return self._requests.get(request_id) is step.requests[request_id]

    def _fail(self, step: StepRun) -> list[EngineOutput]:
        """End every request of a failed step; those not in it go on.

        In it are also those whose blocks it was to copy: nobody knows whether it has.
        """
        assert step.failure is not None
        return [
            output
            for request_id in step.requests
            if self._is_unfinished(step, request_id)
            and (output := self._fail_request(request_id, step.failure)) is not None
        ]

    def _fail_broken(self, step: StepRun, result: StepResult) -> list[EngineOutput]:
        """End requests whose logits hold nothing to choose from."""
        message = "the model's logits are not finite; the weights or their dtype are broken"
        return [
            output
            for request_id, token in result.sampled.items()
            if token.token_id == NO_TOKEN
            and self._is_unfinished(step, request_id)
            and (output := self._fail_request(request_id, message)) is not None
        ]

    def _fail_request(self, request_id: str, message: str) -> EngineOutput | None:
        return self._end(request_id, FinishReason.ERROR, error=message)

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> EngineOutput | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.group.lockstep:
            return self._end_search(request.group, reason, error)
        self.scheduler.finish(request_id, reason, stop_reason)
        output = self._output(request, None, None, error=error)
        self._forget(request)
        return output

    def _advance_beams(self, step: StepRun, result: StepResult) -> list[EngineOutput]:
        """Let searches choose among what their beams have sampled; outputs of those that end."""
        if len(self._beams) == 0:
            return []
        now = time.monotonic()
        outputs = []
        sampled = {
            request_id: token
            for request_id, token in result.sampled.items()
            if self._is_unfinished(step, request_id)
        }
        for group in self._beams.advance(sampled):
            for request in group.requests:
                self._progress[request.request_id].note_token(now)
            if self._beams.is_finished(group):
                outputs.append(self._end_search(group, FinishReason.LENGTH))
        return outputs

    def _end_search(
        self, group: RequestGroup, reason: FinishReason, error: str | None = None
    ) -> EngineOutput:
        """End all beams, each as one of the sequences found; the others for `reason`."""
        requests = tuple(group.requests)
        output = self._output(requests[0], None, None, error=error)
        beams = self._beams.remove(group, reason)
        for request, beam in zip_longest(requests, beams):
            if beam is None:
                self.scheduler.finish(request.request_id, reason)
            else:
                request.token_ids[request.num_prompt_tokens :] = beam.hypothesis.token_ids
                self.scheduler.finish(request.request_id, beam.finish_reason, beam.stop_reason)
            self._forget(request)
        return output._replace(finish_reason=reason, beams=beams)

    def _keep_prompt_logprobs(self, step: StepRun, result: StepResult) -> None:
        for request_id, by_position in result.prompt_logprobs.items():
            if self._is_unfinished(step, request_id):
                self._progress[request_id].keep_prompt_logprobs(by_position)

    def _token_outputs(self, step: StepRun, result: StepResult) -> list[EngineOutput]:
        now = time.monotonic()
        outputs = []
        for request_id, token in result.sampled.items():
            request = step.requests[request_id]
            if self._is_unfinished(step, request_id) and not request.group.lockstep:
                self._progress[request_id].note_token(now)
                outputs.append(self._output(request, token.token_id, token.logprobs))
        return outputs

    def _output(
        self,
        request: Request,
        token_id: int | None,
        logprobs: PositionLogprobs | None,
        error: str | None = None,
    ) -> EngineOutput:
        prompt_logprobs: list[PositionLogprobs | None] | None = None
        wanted = request.sampling_params.prompt_logprobs is not None and request.sample_index == 0
        # A search gives one output only, at its end.
        if wanted and (request.num_output_tokens == 1 or self._beams.has_begun(request.group)):
            prompt_logprobs = self._progress[request.request_id].prompt_logprobs()
        return EngineOutput(
            request.request_id,
            token_id,
            logprobs,
            prompt_logprobs,
            request.finish_reason,
            request.stop_reason,
            request.num_cached_tokens,
            error,
        )

    def _forget(self, request: Request) -> None:
        self._progress.pop(request.request_id).note_end()
        del self._requests[request.request_id]
