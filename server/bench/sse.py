"""Server-sent events out of a byte stream, whatever pieces it arrives in.

Not HTTP and not the meaning of an event (server/bench/dialect.py). Only `data` matters here; comments, ids and retry
times are skipped. Line ends are LF, CRLF or CR. Units: bytes.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 64 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class SSEParser:
    """Turns pieces of a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line, perhaps with a CR whose LF may still come
        self._data: list[bytes] = []
        self._size = 0
        self._started = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of all events that `piece` completes, in order.

        Raises:
            ValueError: one event is larger than any server sends.
        """
        text = self._rest + piece
        if not self._started:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                self._rest = text
                return []
            self._started = True
            text = text.removeprefix(_BOM)
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        made = [event for line in lines if (event := self._line(line)) is not None]
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event of the stream is larger than 64 MiB")
        return made

    def close(self) -> list[bytes]:
        """Return the event that the end of the stream cut short of its empty line, if there is one."""
        lines = self._rest.replace(b"\r", b"\n").split(b"\n") if self._rest else []
        self._rest = b""
        made = [event for line in [*lines, b""] if (event := self._line(line)) is not None]
        return made

    def _line(self, line: bytes) -> bytes | None:
        """Take one whole line; return the event that it ends."""
        if not line:
            if not self._data:
                return None
            event, self._data, self._size = b"\n".join(self._data), [], 0
            return event
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
        elif line == b"data":
            value = b""
        else:
            return None
        self._data.append(value)
        self._size += len(value)
        return None
