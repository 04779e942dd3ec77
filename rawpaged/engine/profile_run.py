"""Runs a made-up workload in this process and traces some of its steps."""

from __future__ import annotations

import queue
from pathlib import Path

from rawpaged.config import EngineConfig
from rawpaged.engine.loading import LoadedEngine, load_engine
from rawpaged.engine.output_processor import Submission
from rawpaged.engine.profiling import Profile, ProfileOptions
from rawpaged.errors import ProfileError
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import RequestOutputKind, SamplingParams
from rawpaged.workload import Workload

_News = RequestOutput | Exception | None
"""What the engine's thread tells; None: the profile has ended."""


def profile_workload(
    config: EngineConfig,
    workload: Workload,
    *,
    steps: tuple[int, int] | None,
    path: Path,
    record_path: Path | None = None,
) -> Profile:
    """Load the model, run the workload, write a Chrome trace of steps [first, last] to `path`.

    The calls of their ops go to `record_path` if it is given. None for steps: all of them. The run
    ends with the last step traced. Raises ProfileError if it is over before the first,
    InvalidRequestError for requests too long, and what loading raises.
    """
    loaded = load_engine(config)
    try:
        submissions = _submissions(loaded, workload)
        news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        options = ProfileOptions(
            path=path,
            record_path=record_path,
            first_step=None if steps is None else steps[0],
            num_steps=None if steps is None else steps[1] - steps[0] + 1,
            on_end=lambda: news.put(None),
        )
        loaded.thread.start_profile(options).result()
        for name, token_ids, params in submissions:
            loaded.thread.submit(Submission(name, None, token_ids, params, news.put))
        _wait(news, len(submissions))
        profile = loaded.thread.stop_profile().result()
    finally:
        loaded.thread.close()
    if profile.num_steps == 0:
        raise ProfileError(
            f"the workload ended before step {profile.first_step}; "
            "ask for earlier steps, more prompts or longer outputs"
        )
    return profile


def _submissions(
    loaded: LoadedEngine, workload: Workload
) -> list[tuple[str, list[int], SamplingParams]]:
    """Name, prompt and parameters of each request, all checked."""
    made = []
    for index, (token_ids, output_len) in enumerate(
        workload.requests(loaded.model_config.vocab_size)
    ):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        loaded.admission.check_params(params, len(token_ids))
        made.append((f"request-{index}", token_ids, params))
    return made


def _wait(news: queue.SimpleQueue[_News], num_requests: int) -> None:
    """Until all requests or the profile has ended."""
    while num_requests:
        item = news.get()
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        num_requests -= item.finished
