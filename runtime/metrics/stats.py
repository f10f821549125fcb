"""Counters of a rank from worker to metrics: bytes in a `RankResult`, `RankStats` in a `Stats`, arrays at the end.

Not counting (telemetry.RankCounters) and not exporting (runtime/metrics/export.py): the two encodings between them.
Units: bytes, operations, seconds, tokens, all cumulative. Arrays travel row-major, little-endian: i64, and f64 for
seconds and operations.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ...telemetry import COMPONENTS, PHASES, RankCounters
from ..plan import pack, unpack
from ..rank_stats import CounterRecord, RankStats

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(CounterRecord)


def encode_counters(counters: RankCounters, memory: tuple[int, ...] = ()) -> bytes:
    """Return `counters`, settled, and what the rank holds (see `CounterRecord`), as bytes for `RankResult.counters`."""
    counters.settle()
    return _ENCODER.encode(
        CounterRecord(
            bytes_moved=pack(counters.bytes_moved, "<i8"),
            flops=pack(counters.flops, "<f8"),
            busy_seconds=pack(counters.busy_seconds, "<f8"),
            host_seconds=pack(counters.host_seconds, "<f8"),
            starved_seconds=pack(counters.starved_seconds, "<f8"),
            steps=pack(counters.steps, "<i8"),
            tokens=pack(counters.tokens, "<i8"),
            expert_tokens=pack(counters.expert_tokens, "<i8"),
            expert_decode_tokens=pack(counters.expert_decode_tokens, "<i8"),
            exchange_bytes=pack(counters.exchange_bytes, "<i8"),
            exchange_seconds=pack(counters.exchange_seconds, "<f8"),
            num_moe_layers=counters.num_moe_layers,
            unowned_ids=counters.unowned_ids,
            waited_seconds=counters.waited_seconds,
            measured_bytes=counters.measured_bytes,
            joules=counters.joules,
            memory=memory,
        )
    )


def rank_stats(
    rank: int, counters: bytes, *, used_blocks: int, total_blocks: int, cache_resident: bool = False
) -> RankStats:
    """Return the `RankStats` of `rank` from what `encode_counters` wrote (empty bytes: nothing counted yet)."""
    record = _DECODER.decode(counters or encode_counters(RankCounters(0, 0)))
    return RankStats(
        rank=rank,
        used_blocks=used_blocks,
        total_blocks=total_blocks,
        cache_resident=cache_resident,
        **msgspec.structs.asdict(record),
    )


def counters_of(data: bytes) -> RankCounters:
    """Return what `encode_counters` encoded."""
    return decode_counters(_DECODER.decode(data))


def decode_counters(stats: CounterRecord) -> RankCounters:
    """Return the arrays of `stats` in their shapes (metrics side)."""
    num_slots = len(stats.expert_tokens) // 8 // stats.num_moe_layers if stats.num_moe_layers else 0
    counters = RankCounters(
        stats.num_moe_layers,
        num_slots,
        unowned_ids=stats.unowned_ids,
        waited_seconds=stats.waited_seconds,
        measured_bytes=stats.measured_bytes,
        joules=stats.joules,
    )
    counters.bytes_moved = unpack(stats.bytes_moved, "<i8").reshape(len(PHASES), len(COMPONENTS))
    counters.flops = unpack(stats.flops, "<f8").reshape(len(PHASES), len(COMPONENTS))
    counters.busy_seconds = unpack(stats.busy_seconds, "<f8")
    counters.host_seconds = unpack(stats.host_seconds, "<f8")
    counters.starved_seconds = unpack(stats.starved_seconds, "<f8")
    counters.steps = unpack(stats.steps, "<i8")
    counters.tokens = unpack(stats.tokens, "<i8")
    counters.exchange_bytes = unpack(stats.exchange_bytes, "<i8")
    counters.exchange_seconds = unpack(stats.exchange_seconds, "<f8")
    shape = (stats.num_moe_layers, num_slots)
    counters.expert_tokens = np.reshape(unpack(stats.expert_tokens, "<i8"), shape)
    counters.expert_decode_tokens = np.reshape(unpack(stats.expert_decode_tokens, "<i8"), shape)
    return counters
