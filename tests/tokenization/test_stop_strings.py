from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawpaged.tokenization.stop_strings import StopStringMatcher


def search_whole(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The obvious definition: go through all ends, and stop at the first that a stop string has."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return text[: end if include_stop else end - len(match)], match
    return text, None


@given(
    chunks=st.lists(st.text("ab", max_size=5), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    include_stop=st.booleans(),
)
def test_any_chunking_gives_what_a_search_of_the_whole_text_gives(
    chunks: list[str], stops: list[str], include_stop: bool
) -> None:
    expected, expected_match = search_whole("".join(chunks), stops, include_stop)
    matcher = StopStringMatcher(stops, include_stop)
    shown, fed, match = "", "", None
    for chunk in chunks:
        news, match = matcher.feed(chunk)
        fed += chunk
        shown += news
        assert expected.startswith(shown)
        if match is not None:
            break
        if not include_stop:
            held = len(fed) - len(shown)
            ends = [n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])]
            assert held == max(ends, default=0)
    shown += matcher.finish()
    assert (shown, match) == (expected, expected_match)


@pytest.mark.parametrize(
    ("stops", "include_stop", "expected"),
    [
        (["b"], False, ("a", "b")),
        (["b"], True, ("ab", "b")),
        (["ab", "b"], False, ("", "ab")),
        (["b", "ab"], False, ("", "ab")),
        (["abc", "b"], False, ("a", "b")),
        (["c", "bc"], False, ("a", "bc")),
        (["x"], False, ("abc", None)),
        ([], False, ("abc", None)),
    ],
)
def test_the_match_that_ends_first_wins_then_the_longest(
    stops: list[str], include_stop: bool, expected: tuple[str, str | None]
) -> None:
    assert StopStringMatcher(stops, include_stop).feed("abc") == expected


@pytest.mark.parametrize(
    ("text", "stop"), [("aaab", "aab"), ("ababac", "abac"), ("aabaabaac", "aabaac")]
)
def test_a_match_may_begin_inside_a_failed_one(text: str, stop: str) -> None:
    matcher = StopStringMatcher([stop], False)
    shown = [matcher.feed(char) for char in text]
    assert "".join(news for news, _ in shown) == text.removesuffix(stop)
    assert shown[-1][1] == stop


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    matcher = StopStringMatcher(["\n\nUser:"], False)
    assert matcher.feed("Hello\n") == ("Hello", None)
    assert matcher.feed("\nUse") == ("", None)
    assert matcher.feed(" it\n") == ("\n\nUse it", None)
    assert matcher.finish() == "\n"
    assert matcher.finish() == ""


def test_include_stop_holds_nothing() -> None:
    matcher = StopStringMatcher(["STOP"], True)
    assert matcher.feed("a ST") == ("a ST", None)
    assert matcher.feed("OP and more") == ("OP", "STOP")


def test_a_long_periodic_stop_string_costs_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopStringMatcher([stop], False)
    shown = "".join(matcher.feed("a" * 100)[0] for _ in range(2_000))
    assert len(shown) == 200_000 - 20_000
    assert matcher.feed("b!") == ("", stop)
