"""One request to an OpenAI-compatible server, streamed, with its times.

Not what is asked (server/bench/datasets.py) and not when (server/bench/load.py). aiohttp reads streams in C: it takes
less than half of the time of httpx for a chunk, so one client process keeps up with tens of thousands a second.
Units: seconds of time.perf_counter.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from .datasets import Sample
from .dialect import Dialect, error_message, read_chunk
from .records import RequestRecord
from .sse import SSEParser

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 30.0
READ_BYTES = 1 << 16
_HEADERS = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
_ENCODER = msgspec.json.Encoder()


@asynccontextmanager
async def connections(
    headers: Mapping[str, str], timeout: float | None, *, proxies: bool = True
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a pool of connections without a limit on their number.

    Args:
        headers: sent with every request.
        timeout: seconds that a request may take in all; None lets it take its time.
        proxies: heed the proxies of the environment.
    """
    import aiohttp

    limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT_S)
    pool = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
    async with aiohttp.ClientSession(
        connector=pool, timeout=limits, headers=dict(headers), read_bufsize=READ_BYTES, trust_env=proxies
    ) as session:
        yield session


class Client:
    """Sends samples to one endpoint.

    Args:
        session: see `connections`.
        url: of the endpoint.
        dialect: how requests are put.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, dialect: Dialect) -> None:
        self._session = session
        self._url = url
        self._dialect = dialect

    async def send(self, sample: Sample) -> RequestRecord:
        """Run one request; what goes wrong with it is in its record."""
        import aiohttp

        record = RequestRecord(prompt_tokens=sample.prompt_len)
        body = _ENCODER.encode(self._dialect.body(sample))
        record.started = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body, headers=_HEADERS, allow_redirects=False) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {error_message(_json(await response.read()))}"
                elif response.content_type != "text/event-stream":
                    record.error = f"the answer is no stream of events but {response.content_type}"
                else:
                    await self._read(response.content, record)
        except TimeoutError:
            record.error = "it took longer than the timeout"
        except aiohttp.ClientConnectorError as error:
            record.error = f"no connection: {error.os_error.strerror or error}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")
        record.ended = time.perf_counter()
        return record

    async def _read(self, content: aiohttp.StreamReader, record: RequestRecord) -> None:
        parser = SSEParser()
        reader = _Reader(record)
        async for piece in content.iter_any():
            now = time.perf_counter()
            for event in parser.feed(piece):
                reader.take(event, now)
        now = time.perf_counter()
        for event in parser.close():
            reader.take(event, now)
        reader.end()


class _Reader:
    """Fills the record of one stream."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._complete = False

    def take(self, event: bytes, now: float) -> None:
        """Note what an event says."""
        chunk, record = read_chunk(event), self._record
        if chunk.error is not None:
            record.error = record.error or chunk.error
        if chunk.tokens:
            record.saw_piece(now)
        if chunk.usage is not None:
            record.prompt_tokens, record.output_tokens = chunk.usage
            record.counted = True
        self._complete = self._complete or chunk.done or chunk.finished

    def end(self) -> None:
        """The stream is over."""
        record = self._record
        if not record.counted:
            record.output_tokens = record.pieces
        if record.error is None and not self._complete:
            record.error = "the stream ended before the answer did"
        if record.error is None and not record.output_tokens and not record.pieces:
            record.error = "the answer holds no token"


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:2000].decode("utf-8", "replace") or "no reason given"
