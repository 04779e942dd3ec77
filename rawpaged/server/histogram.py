"""A Prometheus histogram for values that come with every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """Counts values by bucket; one thread observes, others may collect.

    The client library's own looks at every bucket and takes two locks for each value. What is
    collected while a value is being added may lack it in the sum and have it in its bucket.
    """

    def __init__(
        self, name: str, text: str, labels: dict[str, str], buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count it in the first bucket whose upper bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        total = 0
        buckets = []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            name = floatToGoString(bound)  # type: ignore[no-untyped-call]
            buckets.append((name, float(total)))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]
