"""What messages say of ranks: counters, blocks, the GPU that a rank has, and what live balancing has done.

Not messages (runtime/messages.py has those that carry these records) and not counting (telemetry). Units: fields say;
arrays are little-endian bytes, row-major.
"""

from __future__ import annotations

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of a rank: `GPU-...`, and bytes/s that its memory can move in theory, 0 where nobody says."""

    uuid: str
    peak_bytes_per_second: float = 0.0


class CounterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative counters of one rank: telemetry.RankCounters, flattened row-major (runtime/metrics/stats.py).

    `memory` is what it holds now, bytes, an entry for each of telemetry.MEMORY_PARTS; empty where that is not known.
    """

    bytes_moved: bytes
    flops: bytes
    busy_seconds: bytes
    host_seconds: bytes
    starved_seconds: bytes
    steps: bytes
    tokens: bytes
    expert_tokens: bytes
    expert_decode_tokens: bytes
    exchange_bytes: bytes
    exchange_seconds: bytes
    num_moe_layers: int
    unowned_ids: int
    waited_seconds: float
    measured_bytes: float
    joules: float
    memory: tuple[int, ...] = ()


class RankStats(CounterRecord, frozen=True, kw_only=True):
    """Counters of one rank, and the KV blocks of its cache group that is used most."""

    rank: int
    used_blocks: int
    total_blocks: int
    cache_resident: bool = False


class BalanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """What live balancing has done; sums since the start, seconds of steps by the model of step time.

    Attributes:
        placement: number of the placement that holds.
        slots: i32 [slots of the group], the expert in each slot of the first MoE layer.
        moves: experts that were moved.
        rounds: placements that came into force.
        failures: rounds that some rank could not prepare.
        taken_back: rounds among `rounds` that undid others.
        move_seconds: of reading experts, of the slowest rank of each round.
        predicted_seconds: that decisions promised to save in the steps since.
        realised_seconds: that moves saved on the rows that came; negative where they did harm.
        clocked_seconds: by how much less steps took than like ones before the first move, by a clock.
    """

    placement: int
    slots: bytes
    moves: int = 0
    rounds: int = 0
    failures: int = 0
    taken_back: int = 0
    move_seconds: float = 0.0
    predicted_seconds: float = 0.0
    realised_seconds: float = 0.0
    clocked_seconds: float = 0.0
