from __future__ import annotations

import json

import msgspec

from rawpaged.server.sse import encode_event


class Event(msgspec.Struct):
    text: str


def test_an_event_is_one_line_however_lines_are_split() -> None:
    text = "".join(map(chr, [*range(0x100), 0x2028, 0x2029, 0x1F600]))
    data = encode_event(Event(text)).decode()
    assert data.endswith("\n\n")
    assert len(data.removesuffix("\n\n").splitlines()) == 1
    assert json.loads(data.removeprefix("data: ")) == {"text": text}
