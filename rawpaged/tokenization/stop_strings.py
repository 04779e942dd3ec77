"""Find stop strings in text that arrives in pieces, without showing any part of one too early."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Ends a text at the first stop string, however the text is cut into pieces.

    The match that ends first wins, since generation stops there: nothing that comes later can
    change it. Of several that end at the same character the longest wins. The text shown is
    everything before the stop string, or up to its end with `include_stop`, as in vLLM.

    Without `include_stop` just as much is held back as might begin a stop string: the longest
    suffix of the text that is a proper prefix of one. The work is linear in the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = [_StopString(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that has matched, if one has.

        After a match the rest of `text` is dropped, nothing is held, and no more may be fed.
        """
        if not self._stops:
            return text, None
        end, match = len(text), ""
        for stop in self._stops:
            stop_end = stop.advance(text)
            if stop_end is None:
                continue
            if not match or stop_end < end or (stop_end == end and len(stop.text) > len(match)):
                end, match = stop_end, stop.text
        window = self._held + text
        if match:
            end += len(self._held)
            self._held = ""
            return window[: end if self._include_stop else end - len(match)], match
        num_held = 0 if self._include_stop else max(stop.num_matched for stop in self._stops)
        num_shown = len(window) - num_held
        self._held = window[num_shown:]
        return window[:num_shown], None

    def finish(self) -> str:
        """The text still held back, when the request has ended for another reason."""
        held, self._held = self._held, ""
        return held


class _StopString:
    """Knuth-Morris-Pratt search for one stop string, resumable at every character."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Length of the longest prefix of the stop string that the text so far ends with."""
        self._borders = [0]
        """Of text[: i + 1]: length of its longest proper prefix that is also its suffix."""
        for char in text[1:]:
            length = self._borders[-1]
            while length and text[length] != char:
                length = self._borders[length - 1]
            self._borders.append(length + (text[length] == char))

    def advance(self, text: str) -> int | None:
        """Index in `text` just after the first match that ends in it, or None."""
        wanted, matched, position = self.text, self.num_matched, 0
        while position < len(text):
            if not matched:
                position = text.find(wanted[0], position)
                if position < 0:
                    break
            while matched and wanted[matched] != text[position]:
                matched = self._borders[matched - 1]
            matched += wanted[matched] == text[position]
            position += 1
            if matched == len(wanted):
                return position
        self.num_matched = matched
        return None
