"""Percentiles, and medians over repetitions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Results = Mapping[str, Any]


def distribution(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, with linear interpolation; None without samples."""
    names = ("mean", "p50", "p90", "p99")
    if not seconds:
        return dict.fromkeys(names)
    milliseconds = 1000 * np.asarray(seconds, np.float64)
    values = [milliseconds.mean(), *np.percentile(milliseconds, (50, 90, 99))]
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def median_results(runs: Sequence[Results], *, summed: Sequence[str] = ()) -> dict[str, Any]:
    """Field by field the median of the runs that have it.

    Fields named in `summed` are added up instead: a median would hide errors of the few. Lists
    are joined, dictionaries are reduced in the same way.
    """
    merged: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        present = [value for value in values if value is not None]
        if not present:
            merged[name] = None
        elif isinstance(present[0], Mapping):
            merged[name] = median_results(present, summed=summed)
        elif isinstance(present[0], list):
            merged[name] = [item for value in present for item in value]
        elif name in summed:
            merged[name] = sum(present)
        else:
            # A count stays one: the median of an even number of runs would be a fraction.
            count = all(isinstance(value, int) for value in present)
            merged[name] = (statistics.median_low if count else statistics.median)(present)
    return merged
