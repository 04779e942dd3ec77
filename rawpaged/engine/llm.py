"""The engine for scripts: a list of prompts in, a list of RequestOutput back."""

from __future__ import annotations

import difflib
import itertools
import queue
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rawpaged.config import EngineConfig
from rawpaged.engine.loading import load_engine
from rawpaged.engine.output_processor import Submission
from rawpaged.engine.profiling import Profile, ProfileOptions
from rawpaged.errors import ConfigError, InvalidRequestError
from rawpaged.outputs import RequestOutput
from rawpaged.progress import ProgressBar
from rawpaged.sampling_params import RequestOutputKind, SamplingParams
from rawpaged.scheduler.kv_stats import KVStats

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
"""{"role": ..., "content": ...} as in the OpenAI API."""


class LLM:
    """One model, loaded by the constructor; calls may come from any thread.

    `flags` are the fields of EngineConfig, which are `rawpaged serve`'s flags; a whole
    EngineConfig may stand for model and flags. `close()`, or
    leaving the context manager, frees the memory. Raises ConfigError, CheckpointError and
    BackendError.

        with LLM("smollm2-135m") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(self, model: str | EngineConfig, **flags: Any) -> None:
        _check_flags(flags)
        if isinstance(model, EngineConfig):
            self.config = replace(model, **flags)
        else:
            self.config = EngineConfig(model=model, **flags)
        loaded = load_engine(self.config)
        self.model_config = loaded.model_config
        self.tokenizer = loaded.tokenizer
        self.memory_plan = loaded.plan
        self._admission = loaded.admission
        self._thread = loaded.thread
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; results in the order of the prompts.

        A prompt is a string or a list of token ids. One SamplingParams serves all prompts, a list
        must have one for each. The progress bar shows on terminals only. Raises
        InvalidRequestError before anything runs if any prompt is wrong, RequestFailedError if the
        engine fails.
        """
        prompt_list = _as_list(prompts)
        params_list = _params_list(sampling_params, len(prompt_list))
        tokenized = [
            self._validate(prompt, params)
            for prompt, params in zip(prompt_list, params_list, strict=True)
        ]
        outputs: queue.SimpleQueue[tuple[int, RequestOutput | Exception]] = queue.SimpleQueue()
        names = [f"request-{next(self._numbers)}" for _ in prompt_list]
        try:
            for index, prompt in enumerate(prompt_list):
                self._thread.submit(
                    Submission(
                        names[index],
                        prompt if isinstance(prompt, str) else None,
                        tokenized[index],
                        params_list[index],
                        lambda output, index=index: outputs.put((index, output)),  # type: ignore[misc]
                    )
                )
            return _collect(outputs, len(prompt_list), use_tqdm)
        except BaseException:
            for name in names:
                self._thread.abort(name)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's chat template."""
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer, so it cannot chat", "messages")
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = [
            self.tokenizer.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def start_profile(
        self,
        path: Path | None = None,
        *,
        record_path: Path | None = None,
        first_step: int | None = None,
        num_steps: int | None = None,
    ) -> int:
        """Trace steps from `first_step` (default: the next) on, which is returned.

        The profile ends after `num_steps` or by `stop_profile`; then its Chrome trace is written
        to `path`, and the calls of its ops to `record_path`. Raises ProfileError if one is running
        already, EngineClosedError.
        """
        options = ProfileOptions(
            path=path, record_path=record_path, first_step=first_step, num_steps=num_steps
        )
        return self._thread.start_profile(options).result()

    def stop_profile(self) -> Profile:
        """End the profile, or tell of the one that has ended by itself.

        Raises ProfileError if there is none, TraceFileError if its file could not be written, and
        EngineClosedError.
        """
        return self._thread.stop_profile().result()

    def kv_stats(self) -> KVStats:
        """The KV pool in numbers, when the step that runs is over. Raises EngineClosedError."""
        return self._thread.kv_stats().result()

    def reset_prefix_cache(self) -> int:
        """Let no later request find KV that was computed before; requests that run go on.

        Returns the number of blocks that were to be found. Raises EngineClosedError.
        """
        return self._thread.reset_prefix_cache().result()

    def sleep(self, level: int = 1) -> None:
        """Give memory back to the system or the device until `wake_up`.

        Both levels give back the KV pool, with it the prefix cache, and the activations' buffers.
        Level 1 keeps the weights in host memory, where a CPU has them anyway; level 2 drops them.
        Asleep already, it only goes deeper. Raises SleepError while there are requests, and
        EngineClosedError.
        """
        self._thread.sleep(level).result()

    def wake_up(self) -> None:
        """Take the memory again, and answer as before; after level 2 the checkpoint is read again.

        Raises BackendError or CheckpointError if it cannot be had; then the engine sleeps on.
        """
        self._thread.wake_up().result()

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until `wake_up`."""
        return self._thread.is_sleeping

    def close(self) -> None:
        """Abort what runs, end the engine's threads and free the memory."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        token_ids = self._admission.prompt_token_ids(prompt)
        self._admission.check_params(params, len(token_ids))
        return token_ids


def _check_flags(flags: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that is no field of EngineConfig."""
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for name in flags:
        if name not in known:
            near = "".join(
                f"did you mean {near}? " for near in difflib.get_close_matches(name, known, n=1)
            )
            raise ConfigError(
                f"{name} is no argument of LLM: {near}It takes model and the fields of "
                f"EngineConfig, which are {', '.join(known)}"
            )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many; a flat list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__len__"):
        raise InvalidRequestError(
            f"prompts must be strings or lists of token ids, not {type(prompts).__name__}",
            "prompts",
        )
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_list(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One SamplingParams a prompt; only the final output of each is asked for."""
    if given is None:
        given = SamplingParams()
    params = [given] * count if isinstance(given, SamplingParams) else list(given)
    for each in params:
        if not isinstance(each, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, not {type(each).__name__}",
                "sampling_params",
            )
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling_params were given for {count} prompts", "sampling_params"
        )
    return [_final_only(each) for each in params]


def _final_only(params: SamplingParams) -> SamplingParams:
    """The same parameters with only the last output sent."""
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _collect(
    outputs: queue.SimpleQueue[tuple[int, RequestOutput | Exception]], count: int, use_tqdm: bool
) -> list[RequestOutput]:
    results: dict[int, RequestOutput] = {}
    hidden = None if use_tqdm else True  # None: on anything but a terminal
    with ProgressBar(total=count, desc="requests", disable=hidden, unit="req") as bar:
        while len(results) < count:
            index, output = outputs.get()
            if isinstance(output, Exception):
                raise output
            results[index] = output
            bar.update()
    return [results[index] for index in range(count)]
