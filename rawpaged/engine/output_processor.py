"""From the engine's outputs to RequestOutput: the samples of one prompt together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rawpaged.engine.beam_groups import BeamOutput
from rawpaged.engine.engine_output import EngineOutput
from rawpaged.engine.sample_output import SampleOutput, named_logprobs
from rawpaged.errors import RequestFailedError
from rawpaged.outputs import RequestOutput, TokenLogprobs
from rawpaged.request import FinishReason
from rawpaged.sampling_params import RequestOutputKind, SamplingParams
from rawpaged.tokenization.tokenizer import Tokenizer

Sink = Callable[[RequestOutput | Exception], None]
"""Takes a request's outputs, or the error that ended it, on the engine's thread; never blocks."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as its user sees it: one prompt, n samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sink: Sink
    arrival_time: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """A sample that the engine does not know to be over: it has to end it."""

    sample_id: str
    reason: FinishReason
    stop_reason: str | None = None
    """The stop string that its text has met."""


def sample_id(request_id: str, index: int) -> str:
    """Name of one sample inside the engine."""
    return f"{index}:{request_id}"


class OutputProcessor:
    """State of all requests between the engine's steps and their sinks."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}
        self._samples: dict[str, tuple[_RequestState, SampleOutput]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def holds(self, submission: Submission) -> bool:
        """Whether this very submission is unfinished, and not another of its name."""
        state = self._states.get(submission.request_id)
        return state is not None and state.submission is submission

    def request_ids(self) -> list[str]:
        return list(self._states)

    def add(self, submission: Submission) -> None:
        """Expect outputs of the submission's samples."""
        samples = [
            SampleOutput(index, submission.prompt_token_ids, submission.params, self._tokenizer)
            for index in range(submission.params.num_samples)
        ]
        state = _RequestState(submission, self._tokenizer, samples)
        self._states[submission.request_id] = state
        for sample in samples:
            self._samples[sample_id(submission.request_id, sample.index)] = (state, sample)

    def process(self, outputs: list[EngineOutput]) -> list[SampleEnd]:
        """Send on what a step brought; returns the samples that the engine has to end.

        These are the ones that met a stop string, and the other samples of a request that failed.
        """
        ends = []
        touched: dict[str, _RequestState] = {}
        for output in outputs:
            found = self._samples.get(output.request_id)
            if found is None:
                continue
            state, sample = found
            stop = state.take(sample, output)
            if stop is not None and output.finish_reason is None:
                ends.append(SampleEnd(output.request_id, FinishReason.STOP, stop))
            if sample.finish_reason is not None:
                del self._samples[output.request_id]
            touched[state.submission.request_id] = state
        for request_id, state in touched.items():
            if state.error is not None:
                names = self.unfinished_samples(request_id)
                ends += [SampleEnd(name, FinishReason.ERROR) for name in names]
                self._drop(request_id)
            elif state.finished:
                self._drop(request_id)
            state.emit()
        return ends

    def unfinished_samples(self, request_id: str) -> list[str]:
        """Names of the samples that the engine still works on."""
        state = self._states.get(request_id)
        if state is None:
            return []
        return [
            sample_id(request_id, sample.index)
            for sample in state.samples
            if sample.finish_reason is None
        ]

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error."""
        state = self._states.get(request_id)
        if state is not None:
            self._drop(request_id)
            state.submission.sink(error)

    def _drop(self, request_id: str) -> None:
        state = self._states.pop(request_id)
        for sample in state.samples:
            self._samples.pop(sample_id(request_id, sample.index), None)


@dataclass(slots=True)
class _RequestState:
    """A submission with its samples and what its sink has seen."""

    submission: Submission
    tokenizer: Tokenizer | None
    samples: list[SampleOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs_sent: bool = False
    num_cached_tokens: int = 0
    error: Exception | None = None
    touched: set[int] = field(default_factory=set)

    @property
    def finished(self) -> bool:
        # A loop, as this is asked for every token, and there is one sample most of the time.
        for sample in self.samples:  # noqa: SIM110
            if sample.finish_reason is None:
                return False
        return True

    def take(self, sample: SampleOutput, output: EngineOutput) -> str | None:
        """Apply one engine output; returns a stop string that has just been met."""
        params = self.submission.params
        if output.error is not None:
            self.error = RequestFailedError(output.error)
            return None
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if entry is None else named_logprobs(entry, self.tokenizer)
                for entry in output.prompt_logprobs
            ]
        if sample.index == 0:
            self.num_cached_tokens = output.num_cached_tokens
        if output.beams is not None:
            self._take_beams(output.beams, output.finish_reason)
            return None
        self.touched.add(sample.index)
        stop = None
        if output.token_id is not None:
            if output.logprobs is not None:
                sample.add_logprobs(output.logprobs)
            # The token that ended the request is not part of the text, unless asked for.
            hide = (
                output.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
            )
            stop = sample.add_token(output.token_id, hide_text=hide)
        if stop is not None:
            sample.end(FinishReason.STOP, stop)
        elif output.finish_reason is not None:
            sample.end(output.finish_reason, output.stop_reason)
        return stop

    def _take_beams(
        self, beams: Sequence[BeamOutput], finish_reason: FinishReason | None
    ) -> None:
        """End all samples with what a beam search found, best first."""
        assert finish_reason is not None
        for sample, beam in zip_longest(self.samples, beams):
            self.touched.add(sample.index)
            if beam is None:
                sample.end(finish_reason, None)
            else:
                sample.add_beam(beam)

    def emit(self) -> None:
        """Send one RequestOutput, or the error, unless only the final one is wanted."""
        if self.error is not None:
            self.submission.sink(self.error)
            return
        params, kind = self.submission.params, self.submission.params.output_kind
        is_ranked = params.num_samples > params.n
        if (kind is RequestOutputKind.FINAL_ONLY or is_ranked) and not self.finished:
            return
        if is_ranked:
            self.samples = _best(self.samples, params.n)
        delta = kind is RequestOutputKind.DELTA
        samples = (
            [sample for sample in self.samples if sample.index in self.touched]
            if delta
            else self.samples
        )
        prompt_logprobs = self.prompt_logprobs
        if delta and self.prompt_logprobs_sent:
            prompt_logprobs = None
        self.prompt_logprobs_sent = self.prompt_logprobs is not None
        self.touched.clear()
        self.submission.sink(
            RequestOutput(
                request_id=self.submission.request_id,
                prompt=self.submission.prompt,
                prompt_token_ids=self.submission.prompt_token_ids,
                prompt_logprobs=prompt_logprobs,
                outputs=[sample.completion(delta=delta) for sample in samples],
                finished=self.finished,
                num_cached_tokens=self.num_cached_tokens,
            )
        )


def _best(samples: list[SampleOutput], n: int) -> list[SampleOutput]:
    """The n likeliest samples, best first and numbered so; of equal ones the first."""
    ranked = sorted(samples, key=lambda sample: -sample.cumulative_logprob)[:n]
    for index, sample in enumerate(ranked):
        sample.index = index
    return ranked
