"""Messages cross a channel whole, in order, typed; a lost end is noticed by everybody who waits."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import struct
import threading
import time

import msgspec
import pytest

import moewe.runtime.processes.channel as channel_module
from moewe.runtime.messages import (
    Abort,
    Delta,
    FromEngine,
    FromWorker,
    KVAllocated,
    Outputs,
    Shutdown,
    Submit,
    ToEngine,
    ToWorker,
)
from moewe.runtime.params import SamplingParams
from moewe.runtime.processes.channel import Channel, ChannelClosed, ChannelFull, channel_pair


@pytest.fixture
def pair():
    client, engine = channel_pair(FromEngine, ToEngine)
    yield client, engine
    client.close()
    engine.close()


def big(num_bytes):
    return Submit(request_id="big", prompt_token_ids=os.urandom(num_bytes), params=SamplingParams())


def test_messages_arrive_equal_and_in_order(pair):
    client, engine = pair
    sent = [Abort(request_ids=("a", "b")), big(100), Shutdown(drain=True)]
    for message in sent:
        client.send(message)
    assert [engine.receive(1.0) for _ in sent] == sent
    deltas = Outputs(deltas=(Delta(request_id="a", token_ids=(1, 2), text="ü"),))
    engine.send(deltas)
    assert client.receive_ready() == [deltas]
    assert client.receive_ready() == []


def test_receive_times_out_without_closing(pair):
    client, engine = pair
    start = time.monotonic()
    assert engine.receive(0.05) is None
    assert 0.04 < time.monotonic() - start < 2
    client.send(Shutdown())
    assert engine.receive(0) == Shutdown()


def test_what_was_sent_before_the_end_is_received_before_closed(pair):
    client, engine = pair
    client.send(Abort(request_ids=("x",)))
    client.close()
    assert engine.receive(1.0) == Abort(request_ids=("x",))
    with pytest.raises(ChannelClosed):
        engine.receive(1.0)
    with pytest.raises(ChannelClosed):
        engine.receive_ready()
    assert engine.closed


def test_ends_that_send_large_messages_to_each_other_do_not_block(pair):
    client, engine = pair
    reply = Outputs(deltas=(Delta(request_id="r", text="x" * 5_000_000),))
    got = []

    def answer():
        engine.send(reply)
        got.append(engine.receive(20))

    other = threading.Thread(target=answer, daemon=True)
    other.start()
    client.send(big(5_000_000), timeout=20)
    assert client.receive(20) == reply
    other.join(20)
    assert len(got[0].prompt_token_ids) == 5_000_000


def test_post_never_waits_and_flush_delivers(pair):
    client, engine = pair
    message = big(3_000_000)
    client.post(message)
    assert client.pending_bytes > 0
    assert not client.flush()
    got = None
    while got is None:
        client.flush()
        got = engine.receive(0)
    assert got == message
    assert client.flush() and client.pending_bytes == 0


def test_queue_is_bounded(pair, monkeypatch):
    monkeypatch.setattr(channel_module, "MAX_PENDING_BYTES", 1000)
    client, _ = pair
    client.post(big(1_000_000))
    with pytest.raises(ChannelFull):
        client.post(Shutdown())


def test_message_over_the_limit_is_refused_by_both_ends(pair, monkeypatch):
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 100)
    client, _ = pair
    with pytest.raises(ValueError, match="Submit has"):
        client.send(big(200))
    raw, end = socket.socketpair()
    reader: Channel = Channel(end, ToEngine)
    raw.sendall(struct.pack("<I", 101))
    with pytest.raises(ChannelClosed, match="announced 101 bytes"):
        reader.receive(1.0)
    reader.close()
    raw.close()


def test_message_of_the_wrong_direction_is_refused():
    engine_end, worker_end = channel_pair(FromWorker, ToWorker)
    engine_end.send(KVAllocated(rank=0, memory_bandwidth=1.0))
    with pytest.raises(ChannelClosed, match="no message here"):
        worker_end.receive(1.0)
    engine_end.close()
    worker_end.close()


@pytest.mark.parametrize("end", ["own", "other"])
def test_close_wakes_a_waiting_receiver(pair, end):
    client, engine = pair
    caught = []

    def wait():
        try:
            engine.receive(None)
        except ChannelClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    (client if end == "other" else engine).shutdown()
    thread.join(5)
    assert caught


def test_shutdown_wakes_a_blocked_sender(pair):
    client, _ = pair
    caught = []

    def fill():
        try:
            client.send(big(20_000_000))
        except ChannelClosed as error:
            caught.append(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    client.shutdown()
    thread.join(5)
    assert caught


def test_send_gives_up_after_its_timeout(pair):
    client, _ = pair
    with pytest.raises(TimeoutError, match="did not read"):
        client.send(big(5_000_000), timeout=0.05)


def test_select_and_asyncio_see_a_message(pair):
    client, engine = pair
    client.send(Shutdown())
    assert select.select([engine], [], [], 1.0)[0] == [engine]
    engine.receive_ready()

    async def wait():
        loop, got = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(engine.fileno(), got.set)
        client.post(Abort(request_ids=()))
        await asyncio.wait_for(got.wait(), 5)
        loop.remove_reader(engine.fileno())
        return engine.receive_ready()

    assert asyncio.run(wait()) == [Abort(request_ids=())]


def test_every_message_type_has_a_distinct_tag():
    for union in (ToEngine, FromEngine, ToWorker, FromWorker):
        msgspec.msgpack.Decoder(union)


def test_channel_leaves_no_descriptor():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        a, b = channel_pair(FromEngine, ToEngine)
        a.send(Shutdown())
        b.receive(1)
        a.close()
        b.close()
        a.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert a.fileno() == -1
