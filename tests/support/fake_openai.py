"""An OpenAI-compatible server that says scripted bytes, in pieces whose borders a test chooses, and counts who asked.

Not the application (tests/support/fake_replicas.py has that): raw sockets, so that streams may be broken in any way.
Units: bytes; no clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def text_event(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]})


def answer(*texts: str, usage: dict[str, int] | None = None) -> list[bytes]:
    """A stream with one piece a text and all that belongs to a good end."""
    pieces = [text_event(text) for text in texts] + [text_event("", "length")]
    if usage is not None:
        pieces.append(event({"choices": [], "usage": usage}))
    return [*pieces, event(b"[DONE]")]


@dataclass
class FakeOpenAI:
    """What to say and what was asked.

    Attributes:
        stream: pieces of the answer to every POST; each leaves by itself.
        kind: content type of streams.
        status: of it; other than 200 the pieces are the body.
        routes: bodies of GETs by path; all others are 404.
        ends: how many POSTs get their last piece; later ones stay open. None ends all.
        most: POSTs that ran at one time at most.
    """

    stream: Sequence[bytes] = field(default_factory=lambda: answer(" a", " b", " c", usage=USAGE))
    kind: str = "text/event-stream"
    status: int = 200
    routes: dict[str, str] = field(default_factory=dict)
    ends: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *lines = head.split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
                method, path, _ = line.split(" ")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.paths.append(path)
                self.headers.append(headers)
                if method == "GET":
                    self._whole(writer, 200 if path in self.routes else 404, self.routes.get(path, "{}").encode())
                else:
                    self.bodies.append(json.loads(body))
                    await self._post(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _post(self, writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            self._whole(writer, self.status, b"".join(self.stream))
            return
        number = len(self.bodies)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            kind = f"content-type: {self.kind}\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind.encode())
            for position, piece in enumerate(self.stream):
                if self.ends is not None and number > self.ends and position == len(self.stream) - 1:
                    await asyncio.Event().wait()
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
        finally:
            self.running -= 1

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))


@asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[FakeOpenAI]:
    """Serve `fake` on a free port of this event loop."""
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
