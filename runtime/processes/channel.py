"""`Channel`: typed messages over one end of a socket pair, between threads or processes of one host.

Not a broker and not a network protocol: two ends, both ours. A frame is a u32 length and a msgpack body; never pickle.
Units: bytes, seconds. Use it from plain threads, `select` or asyncio (`fileno`, `receive_ready`, `flush`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")

MAX_MESSAGE_BYTES = 256 << 20
MAX_PENDING_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class ChannelClosed(ConnectionError):
    """The other end is gone, or this end was closed; nothing more will arrive or leave."""


class ChannelFull(ConnectionError):
    """The other end has not read for so long that no more may be queued."""


class Channel(Generic[Received]):
    """One end of a connection.

    `send` waits until the kernel took the message and reads what arrives meanwhile, so two ends that send to each other
    cannot block each other. `post` never waits: what the kernel does not take stays queued for `flush`.
    Any thread may send; one thread at a time may receive; any thread may `close`, which wakes the others.

    Args:
        sock: a connected stream socket; the channel owns it.
        receives: message type (a union of tagged structs) that this end accepts.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        self._send_lock = threading.RLock()
        self._receive_lock = threading.RLock()
        self._outgoing: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._incoming = bytearray()
        self._messages: deque[Received] = deque()
        self._eof = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """True after `close`, or once the other end was found gone and all it sent was read."""
        return self._closed or (self._eof and not self._messages)

    @property
    def pending_bytes(self) -> int:
        """Bytes that `post` queued and the kernel has not taken yet."""
        return self._pending_bytes

    def fileno(self) -> int:
        """File descriptor for select, poll and asyncio; -1 after `close`."""
        return self._sock.fileno()

    # --- sending ---------------------------------------------------------------------------------------------------
    def post(self, message: msgspec.Struct) -> None:
        """Queue `message` and hand on what the kernel takes now. Raises ChannelClosed or ChannelFull."""
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"message {type(message).__name__} has {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}"
            )
        with self._send_lock:
            if self._pending_bytes > MAX_PENDING_BYTES:
                raise ChannelFull(f"the other end left {self._pending_bytes} bytes unread")
            self._outgoing.append(memoryview(_LENGTH.pack(len(body)) + body))
            self._pending_bytes += len(body) + _LENGTH.size
            self.flush()

    def flush(self) -> bool:
        """Hand queued bytes to the kernel without waiting; True when none are left."""
        with self._send_lock:
            while self._outgoing:
                self._check_open()
                try:
                    sent = self._sock.send(self._outgoing[0])
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError as error:
                    raise ChannelClosed("the other end is gone") from error
                self._pending_bytes -= sent
                if sent == len(self._outgoing[0]):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = self._outgoing[0][sent:]
            return True

    def send(self, message: msgspec.Struct, timeout: float | None = None) -> None:
        """Send `message`, waiting for room. Raises ChannelClosed, or TimeoutError after `timeout` seconds."""
        self.post(message)
        if not self.wait_sent(timeout):
            raise TimeoutError(f"the other end did not read for {timeout} s")

    def wait_sent(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued, reading what arrives meanwhile; False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.flush():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._wait(select.POLLOUT | select.POLLIN, left)
            self._read_if_free()
        return True

    def _read_if_free(self) -> None:
        if not self._receive_lock.acquire(blocking=False):
            time.sleep(0.001)  # another thread receives; it makes the room that the other end needs
            return
        try:
            self._read()
        finally:
            self._receive_lock.release()

    # --- receiving -------------------------------------------------------------------------------------------------
    def receive(self, timeout: float | None = None) -> Received | None:
        """Return the next message, or None when none came within `timeout` seconds (None waits for ever).

        Raises:
            ChannelClosed: the other end is gone and everything that it sent was received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._receive_lock:
            while not self._messages:
                self._read()
                if self._messages:
                    break
                if self._eof:
                    raise ChannelClosed("the other end is gone")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._wait(select.POLLIN, left)
            return self._messages.popleft()

    def receive_ready(self) -> list[Received]:
        """Return every message that has arrived, without waiting. Raises ChannelClosed when none is left to come."""
        with self._receive_lock:
            self._read()
            if self._eof and not self._messages:
                raise ChannelClosed("the other end is gone")
            messages = list(self._messages)
            self._messages.clear()
            return messages

    @property
    def has_messages(self) -> bool:
        """True when a message was read from the kernel already, so `select` need not report this channel."""
        return bool(self._messages)

    def _read(self) -> None:
        self._check_open()
        while not self._eof:
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self._eof = not data
            self._incoming += data
            if len(data) < _READ_BYTES:
                break
        self._parse()

    def _parse(self) -> None:
        start = 0
        with memoryview(self._incoming) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_MESSAGE_BYTES:
                    raise ChannelClosed(f"the other end announced {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
                end = start + _LENGTH.size + length
                if len(view) < end:
                    break
                try:
                    self._messages.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                except msgspec.MsgspecError as error:
                    raise ChannelClosed(f"the other end sent what is no message here: {error}") from error
                start = end
        del self._incoming[:start]

    # --- both ------------------------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed("this end was closed")

    def _wait(self, events: int, timeout: float | None) -> None:
        self._check_open()
        poll = select.poll()
        try:
            poll.register(self._sock, events)
        except (ValueError, OSError) as error:  # closed by another thread just now
            raise ChannelClosed("this end was closed") from error
        poll.poll(None if timeout is None else max(0.0, timeout) * 1000)

    def shutdown(self) -> None:
        """Cut the connection but keep the descriptor: threads that wait on either end wake with ChannelClosed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut the connection and free the descriptor. Any thread, any number of times."""
        self._closed = True
        self.shutdown()
        self._sock.close()


def channel_pair(first_receives: Any, second_receives: Any) -> tuple[Channel[Any], Channel[Any]]:
    """Return two connected channels; each receives its own message type."""
    first, second = socket.socketpair()
    return Channel(first, first_receives), Channel(second, second_receives)
