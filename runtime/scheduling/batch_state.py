"""What runs on every rank, in arrays: lengths, phases and KV blocks of each slot.

Not decisions (runtime/scheduler.py): it books them, and it owns the block pools. Lengths are those after all planned
steps, so they run ahead of the workers by the steps in flight.
Shapes: W ranks, S slots a rank, G cache groups, B most blocks of a sequence; arrays are [W, S] if not said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ...kvcache.block_pool import BlockPool
from ...kvcache.groups import first_visible_rows
from .limits import SchedulerConfig
from .request import Request, RequestState
from .token_log import TokenLog

FREE, PREFILL, DECODE = range(3)


@dataclass(frozen=True)
class Seats:
    """Who comes to which rank: n requests in the order in which they are placed.

    Attributes:
        requests: [n].
        ranks: [n].
        known, limits: [n] i64, of each what `BatchState.known` and `BatchState.limit` say.
    """

    requests: Sequence[Request]
    ranks: Sequence[int]
    known: np.ndarray
    limits: np.ndarray


class BatchState:
    """Arrays over all slots of all ranks.

    Attributes:
        version: counts changes of what runs and of who holds which blocks; a plain decode step of all is none.
        turnover: counts changes of who has a slot.
        phase: i8, FREE, PREFILL (some known token is not in KV yet) or DECODE (one token a step).
        sequence_id: i64, -1 where free.
        computed: i32, tokens in KV after the last planned step.
        known: i32, tokens it was admitted with; it samples first when all of them are in KV.
        limit: i32, tokens in KV when its last token is sampled (`Request.most_computed`).
        granted: i32, blocks that it was given in each group so far: always ceil(computed / block_size).
        constrained: bool, it samples only with a mask of its own.
        held: bool, constrained and the mask of its next token has not come: it runs no row that samples.
        judged: bool, log-probabilities of its prompt were still to be told when it came.
        first: [G, W, S] i32, how many of them are behind what its rows can see, and were freed.
        tables: [G, W, S, B] i32, block ids; of a row only [first, granted) mean anything.
        free_blocks: [G, W] i64, free blocks of a rank.
        num_blocks: [G] i64, blocks of a rank.
        pools: [G], free blocks of every rank.
        requests: [W * S], by place (rank * S + slot), None where free.
        log: their newest tokens, by place.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        ranks, slots, groups = config.num_ranks, config.max_num_seqs, len(config.groups)
        self.config = config
        self.version = self.turnover = 0
        self.phase = np.zeros((ranks, slots), np.int8)
        self.sequence_id = np.full((ranks, slots), -1, np.int64)
        self._counts = np.zeros((4, ranks, slots), np.int32)
        self.computed, self.known, self.limit, self.granted = self._counts
        self._marks = np.zeros((3, ranks, slots), np.bool_)
        self.constrained, self.held, self.judged = self._marks
        self.first = np.zeros((groups, ranks, slots), np.int32)
        # Zeros, not -1: pages of it that are never used are never touched.
        self.tables = np.zeros((groups, ranks, slots, config.max_blocks_per_sequence), np.int32)
        self.num_blocks = np.array([group.num_blocks for group in config.groups])
        self.free_blocks = np.repeat(self.num_blocks[:, None], ranks, 1)
        self.pools = [BlockPool(group.num_blocks, ranks) for group in config.groups]
        self._windowed = [(g, group.kind, group.window) for g, group in enumerate(config.groups) if group.is_windowed]
        self.requests: list[Request | None] = [None] * (ranks * slots)
        self.log = TokenLog(ranks * slots)

    def occupy(self, seats: Seats, first_id: int) -> None:
        """Put each of `seats` into the lowest free slot of its rank, one after another, with nothing in KV.

        Their sequence ids count from `first_id`.
        """
        ranks = np.array(seats.ranks)
        places, log = self._lowest_free(ranks), self.log
        self.version += 1
        self.turnover += 1
        self.phase.reshape(-1)[places] = PREFILL
        self.sequence_id.reshape(-1)[places] = np.arange(first_id, first_id + len(places))
        self.known.reshape(-1)[places] = seats.known
        self.limit.reshape(-1)[places] = seats.limits
        log.begin(places)
        slots = (places - ranks * self.config.max_num_seqs).tolist()
        found = zip(count(first_id), seats.requests, seats.ranks, slots, places.tolist())
        for number, request, rank, slot, place in found:
            self.requests[place] = request
            request.sequence_id, request.rank, request.slot = number, rank, slot
            request.log, request.place = log, place
            params = request.params
            if params.structured is not None or params.prompt_logprobs is not None:
                marks = (request.constrained, request.awaits_mask, request.is_judged)
                self._marks[:, rank, slot] = marks

    def _lowest_free(self, ranks: np.ndarray) -> np.ndarray:
        """Return a free place of each of `ranks` [n], all different, the lowest first, [n] i64."""
        free = np.flatnonzero(self.phase == FREE)
        starts = free.searchsorted(np.arange(self.config.num_ranks + 1) * self.config.max_num_seqs)
        counts = np.bincount(ranks, minlength=self.config.num_ranks)
        assert (counts <= starts[1:] - starts[:-1]).all(), "a rank has too few free slots"
        order = ranks.argsort(kind="stable")
        places = np.empty_like(order)
        places[order] = free[starts[ranks[order]] + counting(counts)]
        return places

    def vacate(self, requests: Sequence[Request]) -> np.ndarray:
        """Take `requests` out of their slots and free their blocks, as if one after another; return their places."""
        self.version += 1
        self.turnover += 1
        num_places, num_ranks = len(self.requests), self.config.num_ranks
        places = np.array([request.place for request in requests])
        left = self.log.leave(places)
        for index, request in enumerate(requests):
            assert self.requests[request.place] is request, f"{request.request_id} is not in its slot"
            self.requests[request.place] = None
            request.log, request.place = left, index
        left_places = places
        places = places[::-1]  # what is freed last is given first
        ranks = places // self.config.max_num_seqs
        order = ranks.argsort(kind="stable")
        ranks, places = ranks[order], places[order]
        granted = self.granted.reshape(-1)[places]
        for group, pool in enumerate(self.pools):
            first = self.first[group].reshape(-1)[places]
            held = granted - first
            owners = ranks.repeat(held)  # [n], an entry a block
            entries = (places * self.tables.shape[3] + first).repeat(held) + counting(held)
            pool.free(owners, self.tables[group].reshape(-1)[entries])
            self.free_blocks[group] += np.bincount(owners, minlength=num_ranks)
        self.phase.reshape(-1)[places] = FREE
        self.sequence_id.reshape(-1)[places] = -1
        for fields in (self._counts, self._marks, self.first):
            fields.reshape(-1, num_places)[:, places] = 0
        return left_places

    def free_passed(self) -> None:
        """Free the blocks that no row sees any more: those before what the next row of their sequence sees.

        The last row that saw them is planned, and workers run steps in order: whoever gets such a block in the step
        that is planned now writes it after that.
        """
        for group, kind, window in self._windowed:
            visible = first_visible_rows(kind, window, self.computed) // self.config.block_size  # 0 in a free slot
            held_from = self.first[group]
            ranks, slots = self.where(visible > held_from)
            if not ranks.size:
                continue
            start = held_from[ranks, slots]
            counts = visible[ranks, slots] - start
            held_from[ranks, slots] += counts
            owners, slots = np.repeat(ranks, counts), np.repeat(slots, counts)  # [n], an entry a block, ranks ascending
            ids = self.tables[group, owners, slots, np.repeat(start, counts) + counting(counts)]
            self.pools[group].free(owners, ids)
            self.free_blocks[group] += np.bincount(owners, minlength=self.config.num_ranks)

    def reenter(self, places: np.ndarray) -> None:
        """Let decoding sequences run their last known token as the end of a prompt next; `places` [W, S] bool."""
        self.version += 1
        self.known[places] = self.computed[places] + 1
        self.phase[places] = PREFILL

    def growing(self, decoding: np.ndarray) -> np.ndarray:
        """Return which of `decoding` [W, S] bool need one more block to run one more token."""
        growing: np.ndarray = decoding & (self.computed == self.granted * self.config.block_size)
        return growing

    def grant(self, ranks: np.ndarray, slots: np.ndarray, indices: np.ndarray) -> list[bytes]:
        """Give one block in each group to each of n places of block tables.

        Args:
            ranks, slots, indices: [n], whose table and where in it, next after what is granted; `ranks` ascending, and
                the blocks must be free.

        Returns:
            For each rank, `RankPlan.grants`: i32 rows (group, slot, index, block).
        """
        num_ranks, num_groups = self.config.num_ranks, len(self.config.groups)
        places = ranks * self.config.max_num_seqs + slots
        if not len(ranks):
            return [b""] * num_ranks
        self.version += 1
        counts = np.bincount(ranks, minlength=num_ranks)
        rows = np.empty((len(ranks), num_groups, 4), "<i4")
        rows[:, :, 1] = slots[:, None]
        rows[:, :, 2] = indices[:, None]
        for group, pool in enumerate(self.pools):
            ids = pool.allocate(ranks)
            self.tables[group].reshape(-1)[places * self.tables.shape[3] + indices] = ids
            rows[:, group, 0] = group
            rows[:, group, 3] = ids
        self.granted.reshape(-1)[places] = indices + 1  # of a place that is named more than once the last one stays
        self.free_blocks -= counts
        return split_rows(rows.tobytes(), counts, row_bytes=16 * num_groups)

    def table_rows(self, rank: int) -> bytes:
        """Return all that `rank` holds in the form of `RankPlan.grants`."""
        parts = []
        for group in range(len(self.config.groups)):
            first = self.first[group, rank]
            slots = np.flatnonzero(self.granted[rank] > first)
            held = (self.granted[rank] - first)[slots]
            owners = np.repeat(slots, held)  # [n]
            indices = np.repeat(first[slots], held) + counting(held)
            ids = self.tables[group, rank, owners, indices]
            parts.append(np.stack([np.full_like(owners, group), owners, indices, ids], axis=1))
        return np.concatenate(parts).astype("<i4").tobytes()

    def where(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ranks and slots of `places` [W, S] bool in order, [n] i64 each: as `np.nonzero`, ten times as fast."""
        ranks, slots = np.divmod(np.flatnonzero(places), self.config.max_num_seqs)
        return ranks, slots

    def request_at(self, rank: int, slot: int) -> Request:
        """Return the request in a taken slot."""
        request = self.requests[rank * self.config.max_num_seqs + slot]
        assert request is not None, f"slot {slot} of rank {rank} is free"
        return request

    def running(self, rank: int) -> list[Request]:
        """Return the requests of `rank` in order of slot."""
        slots = self.config.max_num_seqs
        return [request for request in self.requests[rank * slots : (rank + 1) * slots] if request is not None]

    def fullest_groups(self) -> tuple[tuple[int, int], ...]:
        """Return KV blocks in use and in all on each rank, of the cache group that is used most."""
        used = self.num_blocks[:, None] - self.free_blocks  # [G, W]
        fullest = np.argmax(used / self.num_blocks[:, None], axis=0)
        return tuple(
            (int(used[group, rank]), int(self.num_blocks[group])) for rank, group in enumerate(fullest.tolist())
        )

    def residue(self) -> str | None:
        """Say what is left in a batch that should be empty; None when the books balance. Cheap, and no assertion."""
        if self.phase.any() or any(request is not None for request in self.requests):
            return f"{int(np.count_nonzero(self.phase))} slots are taken"
        if self.granted.any() or self.first.any() or self.computed.any():
            return "a free slot holds blocks"
        for group, pool in enumerate(self.pools):
            if not pool.is_whole():
                used = pool.num_used.tolist()
                return f"KV blocks of cache group {group} in use, by rank: {used} of {pool.num_blocks}"
        if (self.free_blocks != self.num_blocks[:, None]).any():
            return f"free blocks are counted as {self.free_blocks.tolist()} of {self.num_blocks.tolist()}"
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError when arrays, pools and requests contradict each other."""
        taken = self.phase != FREE
        assert ((self.sequence_id >= 0) == taken).all(), "a free slot has a sequence, or a taken one has none"
        assert (self.granted == -(-self.computed // self.config.block_size)).all(), (
            "a sequence was given too many or too few blocks"
        )
        for g, group in enumerate(self.config.groups):
            visible = first_visible_rows(group.kind, group.window, self.computed) // self.config.block_size
            assert (self.first[g] <= visible).all(), "a block was freed that a row will see"
            assert (self.first[g] <= self.granted).all(), "a block was freed that was never given"
        assert not (self.held & ~self.constrained).any(), "a sequence waits for a mask that it does not need"
        for fields in (self._counts, self._marks, self.first):
            assert not fields[:, ~taken].any(), "a free slot holds something"
        assert (self.computed[taken] <= self.limit[taken]).all(), "a sequence was planned beyond its limit"
        assert ((self.computed < self.known) == (self.phase == PREFILL))[taken].all(), "a phase is wrong"
        ids = self.sequence_id[taken]
        assert np.unique(ids).size == ids.size, "a sequence is in two slots"
        for g, pool in enumerate(self.pools):
            pool.check_invariants()
            places = np.arange(self.tables.shape[3])
            rows = (places >= self.first[g][:, :, None]) & (places < self.granted[:, :, None])
            for rank in range(self.config.num_ranks):
                held = np.sort(self.tables[g, rank][rows[rank]])
                assert np.array_equal(held, pool.used_ids(rank)), f"tables of rank {rank} and its pool disagree"
            assert (pool.num_free == self.free_blocks[g]).all(), f"free blocks of group {g} are miscounted"
        self.log.check_invariants(self.requests)
        for place, request in enumerate(self.requests):
            rank, slot = divmod(place, self.config.max_num_seqs)
            assert (request is not None) == bool(taken[rank, slot]), f"slot {slot} of rank {rank}"
            if request is not None:
                assert (request.rank, request.slot, request.state) == (rank, slot, RequestState.RUNNING)
                assert request.log is self.log, "a request writes its tokens elsewhere"
                assert request.sequence_id == self.sequence_id[rank, slot]
                marks = (bool(self.constrained[rank, slot]), bool(self.held[rank, slot]))
                assert marks == (request.constrained, request.awaits_mask), f"{request.request_id}: {marks}"


def split_rows(data: bytes, counts: np.ndarray, *, row_bytes: int) -> list[bytes]:
    """Cut `data`, `counts[i]` rows for part i, into its parts."""
    ends = (np.cumsum(counts) * row_bytes).tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def counting(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, .. counts[i] - 1 for each i, one after another."""
    ends = counts.cumsum()
    places: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts)
    return places
