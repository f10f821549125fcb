"""What runs on every rank, in arrays: lengths, phases and KV blocks of each slot.

Not decisions (runtime/scheduler.py): it books them, and it owns the block pools. Lengths are those after all planned
steps, so they run ahead of the workers by the steps in flight.
Shapes: W ranks, S slots a rank, G cache groups, B most blocks of a sequence; arrays are [W, S] if not said otherwise.
"""

from __future__ import annotations

import numpy as np

from ...kvcache.block_pool import BlockPool
from .limits import SchedulerConfig
from .request import Request, RequestState

FREE, PREFILL, DECODE = range(3)


class BatchState:
    """Arrays over all slots of all ranks.

    Attributes:
        phase: i8, FREE, PREFILL (some known token is not in KV yet) or DECODE (one token a step).
        sequence_id: i64, -1 where free.
        computed: i32, tokens in KV after the last planned step.
        known: i32, tokens it was admitted with; it samples first when all of them are in KV.
        limit: i32, tokens in KV when its last token is sampled (`max_length - 1`).
        held: i32, blocks that it holds in each group: always ceil(computed / block_size).
        tables: [G, W, S, B] i32, block ids; only the first `held` of a row mean anything.
        free_blocks: [W] i64, free blocks of a rank (the same in every group).
        pools: `pools[rank][group]`.
        requests: `requests[rank][slot]`, None where free.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        ranks, slots, groups = config.num_ranks, config.max_num_seqs, config.num_groups
        self.config = config
        self.phase = np.zeros((ranks, slots), np.int8)
        self.sequence_id = np.full((ranks, slots), -1, np.int64)
        self.computed = np.zeros((ranks, slots), np.int32)
        self.known = np.zeros((ranks, slots), np.int32)
        self.limit = np.zeros((ranks, slots), np.int32)
        self.held = np.zeros((ranks, slots), np.int32)
        # Zeros, not -1: pages of it that are never used are never touched.
        self.tables = np.zeros((groups, ranks, slots, config.max_blocks_per_sequence), np.int32)
        self.free_blocks = np.full(ranks, config.num_blocks, np.int64)
        self.pools = [[BlockPool(config.num_blocks) for _ in range(groups)] for _ in range(ranks)]
        self.requests: list[list[Request | None]] = [[None] * slots for _ in range(ranks)]

    def free_slot(self, rank: int) -> int:
        """Return the lowest free slot of `rank`; there must be one."""
        slot = int(np.argmax(self.phase[rank] == FREE))
        assert self.phase[rank, slot] == FREE, f"rank {rank} has no free slot"
        return slot

    def occupy(self, request: Request, *, rank: int, slot: int, sequence_id: int) -> None:
        """Put `request` into a free slot, with nothing in KV."""
        assert self.phase[rank, slot] == FREE, f"slot {slot} of rank {rank} is taken"
        self.phase[rank, slot] = PREFILL
        self.sequence_id[rank, slot] = sequence_id
        self.computed[rank, slot] = 0
        self.known[rank, slot] = request.num_tokens
        self.limit[rank, slot] = request.max_length - 1
        self.requests[rank][slot] = request
        request.rank, request.slot, request.sequence_id = rank, slot, sequence_id

    def vacate(self, request: Request) -> None:
        """Take `request` out of its slot and free its blocks."""
        rank, slot = request.rank, request.slot
        assert self.requests[rank][slot] is request, f"{request.request_id} is not in slot {slot} of rank {rank}"
        held = int(self.held[rank, slot])
        for group, pool in enumerate(self.pools[rank]):
            pool.free(self.tables[group, rank, slot, :held])
        self.free_blocks[rank] += held
        self.phase[rank, slot] = FREE
        self.sequence_id[rank, slot] = -1
        self.computed[rank, slot] = self.known[rank, slot] = self.limit[rank, slot] = self.held[rank, slot] = 0
        self.requests[rank][slot] = None

    def growing(self, decoding: np.ndarray) -> np.ndarray:
        """Return which of `decoding` [W, S] bool need one more block to run one more token."""
        growing: np.ndarray = decoding & (self.computed == self.held * self.config.block_size)
        return growing

    def grant(self, ranks: np.ndarray, slots: np.ndarray, indices: np.ndarray) -> list[bytes]:
        """Give one block in each group to each of n places of block tables.

        Args:
            ranks, slots, indices: [n], whose table and where in it; `ranks` ascending, and the blocks must be free.

        Returns:
            For each rank, `RankPlan.grants`: i32 rows (group, slot, index, block).
        """
        num_ranks, num_groups = self.config.num_ranks, self.config.num_groups
        counts = np.bincount(ranks, minlength=num_ranks)
        takers = [(rank, count) for rank, count in enumerate(counts.tolist()) if count]
        if not takers:
            return [b""] * num_ranks
        rows = np.empty((len(ranks), num_groups, 4), "<i4")
        rows[:, :, 1] = slots[:, None]
        rows[:, :, 2] = indices[:, None]
        for group in range(num_groups):
            ids = np.concatenate([self.pools[rank][group].allocate(count) for rank, count in takers])
            self.tables[group, ranks, slots, indices] = ids
            rows[:, group, 0] = group
            rows[:, group, 3] = ids
        np.add.at(self.held, (ranks, slots), 1)
        self.free_blocks -= counts
        return split_rows(rows.tobytes(), counts, row_bytes=16 * num_groups)

    def table_rows(self, rank: int) -> bytes:
        """Return all that `rank` holds in the form of `RankPlan.grants`."""
        slots = np.flatnonzero(self.held[rank])
        held = self.held[rank, slots]
        slots = np.repeat(slots, held)  # [n]
        indices = np.arange(len(slots)) - np.repeat(np.cumsum(held) - held, held)  # [n], 0..held-1 for each slot
        rows = np.empty((len(slots), self.config.num_groups, 4), "<i4")
        for group in range(self.config.num_groups):
            rows[:, group, 0], rows[:, group, 1], rows[:, group, 2] = group, slots, indices
            rows[:, group, 3] = self.tables[group, rank, slots, indices]
        return rows.tobytes()

    def request_at(self, rank: int, slot: int) -> Request:
        """Return the request in a taken slot."""
        request = self.requests[rank][slot]
        assert request is not None, f"slot {slot} of rank {rank} is free"
        return request

    def running(self, rank: int) -> list[Request]:
        """Return the requests of `rank` in order of slot."""
        return [request for request in self.requests[rank] if request is not None]

    def residue(self) -> str | None:
        """Say what is left in a batch that should be empty; None when the books balance. Cheap, and no assertion."""
        if self.phase.any() or any(request is not None for requests in self.requests for request in requests):
            return f"{int(np.count_nonzero(self.phase))} slots are taken"
        if self.held.any() or self.computed.any():
            return "a free slot holds blocks"
        for rank, pools in enumerate(self.pools):
            if not all(pool.is_whole() for pool in pools):
                used = [pool.num_used for pool in pools]
                return f"KV blocks in use on rank {rank}, by cache group: {used} of {self.config.num_blocks}"
        if (self.free_blocks != self.config.num_blocks).any():
            return f"free blocks are counted as {self.free_blocks.tolist()} of {self.config.num_blocks}"
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError when arrays, pools and requests contradict each other."""
        taken = self.phase != FREE
        assert ((self.sequence_id >= 0) == taken).all(), "a free slot has a sequence, or a taken one has none"
        assert (self.held == -(-self.computed // self.config.block_size)).all(), (
            "a sequence holds too many or too few blocks"
        )
        assert not self.computed[~taken].any(), "a free slot has tokens in KV"
        assert (self.computed[taken] <= self.limit[taken]).all(), "a sequence was planned beyond its limit"
        assert ((self.computed < self.known) == (self.phase == PREFILL))[taken].all(), "a phase is wrong"
        ids = self.sequence_id[taken]
        assert np.unique(ids).size == ids.size, "a sequence is in two slots"
        for rank, pools in enumerate(self.pools):
            for group, pool in enumerate(pools):
                pool.check_invariants()
                rows = np.arange(self.tables.shape[3]) < self.held[rank][:, None]
                held = np.sort(self.tables[group, rank][rows])
                assert np.array_equal(held, pool.used_ids()), f"tables of rank {rank} and its pool disagree"
                assert pool.num_free == self.free_blocks[rank], f"free blocks of rank {rank} are miscounted"
            for slot, request in enumerate(self.requests[rank]):
                assert (request is not None) == bool(taken[rank, slot]), f"slot {slot} of rank {rank}"
                if request is not None:
                    assert (request.rank, request.slot, request.state) == (rank, slot, RequestState.RUNNING)
                    assert request.sequence_id == self.sequence_id[rank, slot]


def split_rows(data: bytes, counts: np.ndarray, *, row_bytes: int) -> list[bytes]:
    """Cut `data`, `counts[i]` rows for part i, into its parts."""
    ends = (np.cumsum(counts) * row_bytes).tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
