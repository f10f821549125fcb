"""Events out of pieces with any borders and any line ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.server.bench import sse
from moewe.server.bench.sse import SSEParser

_LINES = st.binary(max_size=12).map(lambda line: line.translate(None, b"\r\n"))
_EVENTS = st.lists(st.lists(_LINES, min_size=1, max_size=3), max_size=6)


def parse(stream: bytes, borders: list[int]) -> list[bytes]:
    parser, events = SSEParser(), []
    cuts = sorted({0, len(stream), *(border % (len(stream) + 1) for border in borders)})
    for start, stop in pairwise(cuts):
        events += parser.feed(stream[start:stop])
    return events + parser.close()


@given(_EVENTS, st.lists(st.integers(0, 10**6)), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans(), st.booleans())
def test_borders_and_line_ends_change_nothing(
    contents: list[list[bytes]], borders: list[int], end: bytes, noise: bool, bom: bool
) -> None:
    stream = b"\xef\xbb\xbf" if bom else b""
    for lines in contents:
        stream += (b": ping" + end + b"event: x" + end + b"id: 7" + end) * noise
        stream += b"".join(b"data: " + line + end for line in lines) + end
    assert parse(stream, borders) == [b"\n".join(lines) for lines in contents]


def test_every_single_border() -> None:
    stream = 'data: {"é": 1}\r\n\r\ndata:two\r\ndata\r\n\r\n\r\ndata: [DONE]\n\n'.encode()
    for border in range(len(stream) + 1):
        assert parse(stream, [border]) == ['{"é": 1}'.encode(), b"two\n", b"[DONE]"]
    assert parse(stream, list(range(len(stream)))) == ['{"é": 1}'.encode(), b"two\n", b"[DONE]"]


def test_several_events_in_one_piece_come_at_once() -> None:
    assert SSEParser().feed(b"data: 1\n\ndata: 2\n\ndata: 3") == [b"1", b"2"]


def test_the_end_of_the_stream_ends_the_last_event() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: 1\ndata: 2") == [] and parser.close() == [b"1\n2"]
    assert parser.close() == []


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = SSEParser()
    with pytest.raises(ValueError, match="larger"):
        for _ in range(20):
            parser.feed(b"data: 0123456789\n")
    with pytest.raises(ValueError, match="larger"):
        SSEParser().feed(b"x" * 101)
