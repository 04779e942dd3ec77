"""Our histogram is the client library's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from rawpaged.server.histogram import TokenHistogram

BUCKETS = (0.001, 0.5, 1.0, 20.0, 1e5)


@given(st.lists(st.one_of(st.sampled_from([0.0, *BUCKETS]), st.floats(0, 1e6))))
def test_the_same_text_as_the_client_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = {"model_name": 'm"\n', "other": "x"}
    own = TokenHistogram("a:seconds", "Time.", labels, BUCKETS)
    ours.register(own)
    parent = Histogram("a:seconds", "Time.", labels, buckets=BUCKETS, registry=theirs)
    other = parent.labels(**labels)
    for value in values:
        own.observe(value)
        other.observe(value)
    expected = [
        line for line in generate_latest(theirs).splitlines() if b"_created" not in line
    ]
    assert generate_latest(ours).splitlines() == expected
