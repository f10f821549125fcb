"""The running batch of one rank: every sequence's tokens, blocks and sampling state, in arrays indexed by slot.

Not a scheduler: it turns the delta of a plan into the rows of a step, in numpy, and books their outcome.
Shapes: S slots, T rows of the step (decode rows first, by slot; then a run a chunk), B most blocks of a sequence, G
cache groups. A block table has an entry for every block of a sequence; those before the first that its next row sees
are stale: their blocks belong to others by now, and nothing may look at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kvcache.groups import first_visible_rows
from ..plan import FINISH_ERROR, FINISH_NONE, Admission, Chunk, RankPlan, unpack
from .finish import Committed, commit_tokens
from .logit_edits import LogitEdits
from .sampler import SamplingRows
from .sampling_state import SlotSampling

FREE = -1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of rows of one sequence: rows [row_start, row_start + num_rows), `num_computed_tokens` before them in KV.

    `block_table` is [n] i32, the blocks of tokens [0, num_computed_tokens + num_rows) in one cache group, with stale
    entries where the first row sees nothing.
    """

    slot: int
    row_start: int
    num_rows: int
    num_computed_tokens: int
    block_table: np.ndarray


@dataclass(frozen=True, kw_only=True)
class GroupRows:
    """Where the rows of a step read and write in one cache group.

    Attributes:
        slot_mapping: [T] i64.
        segments: the chunks, ascending by row.
        tables: [S, B] i32, the block tables of all slots as they are now.
        decode_slots, decode_lengths: [N] i64, as in `StepRows`.
        block_size: tokens a block.
    """

    slot_mapping: np.ndarray
    segments: tuple[Segment, ...]
    tables: np.ndarray
    decode_slots: np.ndarray
    decode_lengths: np.ndarray
    block_size: int

    @property
    def decode_tables(self) -> np.ndarray:
        """Block tables of the decode rows, [N, n] i32; entries that a row does not see may be stale or -1."""
        width = -(-int(self.decode_lengths.max()) // self.block_size) if self.decode_slots.size else 0
        return self.tables[self.decode_slots, :width]


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rows of one step on one rank. They hold until the next are asked for, which may stand in the same arrays.

    Attributes:
        input_ids, positions: [T] i64.
        row_slots: [T] i64, the slot of every row.
        groups: one for each cache group.
        decode_slots: [N] i64; decode row number i belongs to `decode_slots[i]`.
        decode_lengths: [N] i64, tokens to attend to, this row's own included.
        sample_rows: [K] i64, rows whose logits are wanted.
        sample_slots: [K] i64, whose they are.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    row_slots: np.ndarray
    groups: tuple[GroupRows, ...]
    decode_slots: np.ndarray
    decode_lengths: np.ndarray
    sample_rows: np.ndarray
    sample_slots: np.ndarray

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The chunks, ascending by row; in every group the same but for their block tables."""
        return self.groups[0].segments


class WorkerBatch:
    """Arrays of all slots of one rank; changed by `apply`, read by `rows`, advanced by `commit`.

    Args:
        num_slots: S.
        max_model_len: longest sequence, prompt and output.
        block_size: tokens a KV block.
        groups: kind and window of each cache group (see `kvcache.CacheGroup`).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        groups: Sequence[tuple[str, int]] = (("full", 0),),
    ) -> None:
        self.groups = tuple(groups)
        self.num_slots, self.block_size = num_slots, block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.tokens: list[np.ndarray] = [np.empty(0, np.int32)] * num_slots  # given at admission, kept for chunks
        self.sequence_ids = np.full(num_slots, FREE, np.int64)
        self.block_table = np.full((len(groups), num_slots, self.max_blocks), FREE, np.int32)  # -1 where never granted
        self.first_block = np.zeros((len(groups), num_slots), np.int64)  # entries before it are stale
        self.end_block = np.zeros((len(groups), num_slots), np.int64)  # one behind the last that was granted
        self.num_tokens = np.zeros(num_slots, np.int64)  # known tokens, the last one sampled included
        self.num_computed_tokens = np.zeros(num_slots, np.int64)
        self.max_length = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.decoding = np.zeros(num_slots, np.bool_)
        self.finished = np.zeros(num_slots, np.bool_)
        self.sampling = SlotSampling(num_slots)
        self._decodes: StepRows | None = None  # of the last step, while the same sequences decode and nothing else runs
        self._decoding_at: slice | np.ndarray = slice(0)  # their slots, in the form that is fastest

    def apply(self, plan: RankPlan, *, snapshot: bool = False) -> None:
        """Take over what `plan` releases, admits and grants; with `snapshot` forget everything first."""
        if snapshot:
            self._release(np.flatnonzero(self.sequence_ids != FREE))
        if snapshot or plan.released or plan.admitted:
            self._decodes = None
        if plan.released:
            self._release(unpack(plan.released))
        for admission in plan.admitted:
            self._admit(admission)
        if plan.grants:
            grants = unpack(plan.grants).reshape(-1, 4)  # (group, slot, index, block)
            self.block_table[grants[:, 0], grants[:, 1], grants[:, 2]] = grants[:, 3]
            np.maximum.at(self.end_block, (grants[:, 0], grants[:, 1]), grants[:, 2] + 1)
        for group, (kind, window) in enumerate(self.groups):
            if window:  # what the next row cannot see was freed with this plan, and may be granted to others in it
                visible = first_visible_rows(kind, window, self.num_computed_tokens)
                np.floor_divide(visible, self.block_size, out=self.first_block[group])

    def rows(self, chunks: Sequence[Chunk], held: bytes = b"") -> StepRows:
        """Return the rows of a step that runs `chunks` and one token of every decoding sequence that goes on.

        `held` are those that sit out (see `RankPlan`). The same object comes back while the same sequences decode and
        nothing else runs, with other numbers in its arrays.
        """
        if chunks or held:
            self._decodes = None
            return self._build_rows(chunks, held)
        if self._decodes is None:
            self._decodes = rows = self._build_rows((), b"")
            slots = rows.decode_slots
            together = slots.size and slots[-1] - slots[0] + 1 == slots.size
            self._decoding_at = slice(int(slots[0]), int(slots[-1]) + 1) if together else slots
            return rows
        rows, at = self._decodes, self._decoding_at
        rows.input_ids[:] = self.last_token[at]
        rows.positions[:] = self.num_computed_tokens[at]
        np.add(rows.positions, 1, out=rows.decode_lengths)
        self._map_slots(rows.positions, rows.decode_slots, [group.slot_mapping for group in rows.groups])
        return rows

    def _build_rows(self, chunks: Sequence[Chunk], held: bytes) -> StepRows:
        going = self.decoding & ~self.finished
        if held:
            going[unpack(held)] = False
        slots = np.flatnonzero(going)
        lengths = self.num_computed_tokens[slots] + 1
        running = [chunk for chunk in chunks if not self.finished[chunk.slot]]  # others: planned before this verdict
        ids, positions, row_slots = [self.last_token[slots]], [self.num_computed_tokens[slots]], [slots]
        sample_rows, sample_slots = [np.arange(slots.size)], [slots]
        start, starts = slots.size, []
        for chunk in running:
            stop = chunk.start + chunk.num_tokens
            ids.append(self.tokens[chunk.slot][chunk.start : stop].astype(np.int64))
            positions.append(np.arange(chunk.start, stop))
            row_slots.append(np.full(chunk.num_tokens, chunk.slot))
            starts.append(start)
            start += chunk.num_tokens
            if chunk.samples:
                sample_rows.append(np.array([start - 1]))
                sample_slots.append(np.array([chunk.slot]))
        position, owner = np.concatenate(positions), np.concatenate(row_slots)
        slot_mapping = np.empty((len(self.groups), len(position)), np.int64)
        self._map_slots(position, owner, slot_mapping)
        return StepRows(
            input_ids=np.concatenate(ids),
            positions=position,
            row_slots=owner,
            groups=tuple(
                GroupRows(
                    slot_mapping=slot_mapping[group],
                    segments=tuple(self._segment(group, *at) for at in zip(running, starts, strict=True)),
                    tables=self.block_table[group],
                    decode_slots=slots,
                    decode_lengths=lengths,
                    block_size=self.block_size,
                )
                for group in range(len(self.groups))
            ),
            decode_slots=slots,
            decode_lengths=lengths,
            sample_rows=np.concatenate(sample_rows),
            sample_slots=np.concatenate(sample_slots),
        )

    def _map_slots(self, positions: np.ndarray, owners: np.ndarray, out: Sequence[np.ndarray] | np.ndarray) -> None:
        """Fill in, for each group, where K and V of rows at `positions` [T] of the sequences in `owners` [T] go."""
        index, offset = np.divmod(positions, self.block_size)
        for table, mapping in zip(self.block_table, out):
            np.multiply(table[owners, index], self.block_size, out=mapping, casting="unsafe", dtype=np.int64)
            assert not mapping.size or mapping.min() >= 0, "a row has no KV block"
            mapping += offset

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """Return how the next token of each of `slots` is to be chosen, [K] a field."""
        return self.sampling.rows(slots, self.num_tokens[slots])

    def logit_edits(self, slots: np.ndarray) -> LogitEdits | None:
        """Return what `slots` do to the logits of their next token, masks aside; None for nothing."""
        return self.sampling.edits(slots, self.num_tokens[slots])

    def commit(self, rows: StepRows, tokens: np.ndarray, healthy: np.ndarray | None = None) -> Committed:
        """Book the outcome of a step; return what its samples keep and whether they end.

        Args:
            rows: what ran.
            tokens: [K] or [K, Q] i64, chosen at `rows.sample_rows`, see `commit_tokens`.
            healthy: [S] bool by slot; False where something was not finite: the sequence ends. None: all are well.
        """
        if rows is self._decodes and healthy is None and tokens.ndim == 1:
            return self._commit_decodes(rows, tokens)
        self._decodes = None
        self.num_computed_tokens[rows.decode_slots] += 1
        for segment in rows.segments:
            self.num_computed_tokens[segment.slot] = segment.num_computed_tokens + segment.num_rows
        slots, tokens = rows.sample_slots, tokens if tokens.ndim > 1 else tokens[:, None]
        kept = commit_tokens(tokens, self.num_tokens[slots], self.max_length[slots], self.sampling.ends[slots])
        self.num_tokens[slots] += kept.counts
        self.last_token[slots] = tokens[np.arange(slots.size), np.maximum(kept.counts - 1, 0)]
        self.decoding[slots] = True
        self.sampling.note(slots, tokens, kept.counts)
        if healthy is not None:
            kept.flags[~healthy[slots]] = FINISH_ERROR
            self.finished |= ~healthy
        self.finished[slots] = kept.flags != FINISH_NONE
        return kept

    def _commit_decodes(self, rows: StepRows, tokens: np.ndarray) -> Committed:
        """Book a token of each sequence of `rows`, which decode and have room for it: they have not finished."""
        at, lengths = self._decoding_at, rows.decode_lengths
        kept = commit_tokens(tokens[:, None], lengths, self.max_length[at], self.sampling.ends[at])
        self.num_computed_tokens[at] = lengths
        self.num_tokens[at] += kept.counts
        self.last_token[at] = tokens
        self.sampling.note(rows.decode_slots, tokens[:, None], kept.counts)
        if kept.flags.any():
            self.finished[at] = kept.flags != FINISH_NONE
            self._decodes = None
        return kept

    def blocks_of(self, slot: int, group: int = 0) -> np.ndarray:
        """Return the blocks of `group` that `slot` held in the step that ran last, [n] i64."""
        row = self.block_table[group, slot, self.first_block[group, slot] :]
        held: np.ndarray = row[row != FREE]
        return held.astype(np.int64)

    def kv_in_use(self, group: int) -> tuple[int, int]:
        """Return how many blocks of `group` sequences hold, and for how many tokens there is KV in them."""
        first, end = self.first_block[group], self.end_block[group]
        blocks, tokens = end - first, self.num_computed_tokens - first * self.block_size
        return int(np.maximum(blocks, 0).sum()), int(np.maximum(tokens, 0).sum())

    @property
    def num_running(self) -> int:
        """Sequences that this worker would still run."""
        return int(((self.sequence_ids != FREE) & ~self.finished).sum())

    def check_invariants(self) -> None:
        """Raise AssertionError when the arrays contradict each other."""
        free = self.sequence_ids == FREE
        assert not self.decoding[free].any(), "a free slot decodes"
        assert not self.finished[free].any(), "a free slot has finished"
        assert (self.block_table[:, free] == FREE).all(), "a free slot holds blocks"
        assert (self.num_computed_tokens <= self.num_tokens).all(), "more tokens in KV than known"
        ids = self.sequence_ids[~free]
        assert np.unique(ids).size == ids.size, "a sequence is in two slots"
        places = np.arange(self.max_blocks)
        for group, (_, window) in enumerate(self.groups):
            first = self.first_block[group]
            held = (self.block_table[group] != FREE) & (places >= first[:, None])
            # Of a sequence that ended here unknown to the scheduler, blocks behind its window may have been freed.
            owners = held & ~self.finished[:, None] if window else held
            ids = self.block_table[group][owners]
            assert np.unique(ids).size == ids.size, "a block belongs to two sequences"
            ends = ((self.block_table[group] != FREE) * (places + 1)).max(1)
            assert (self.end_block[group] == ends).all(), "granted blocks were miscounted"
            enough = (first + held.sum(1)) * self.block_size >= self.num_computed_tokens
            assert enough[~free].all(), "tokens in KV without a block"

    def _segment(self, group: int, chunk: Chunk, row_start: int) -> Segment:
        stop = chunk.start + chunk.num_tokens
        return Segment(
            slot=chunk.slot,
            row_start=row_start,
            num_rows=chunk.num_tokens,
            num_computed_tokens=chunk.start,
            block_table=self.block_table[group, chunk.slot, : -(-stop // self.block_size)],
        )

    def _release(self, slots: np.ndarray) -> None:
        self.sequence_ids[slots] = FREE
        self.block_table[:, slots] = FREE
        self.end_block[:, slots] = 0
        self.decoding[slots] = False
        self.finished[slots] = False
        self.num_tokens[slots] = 0
        self.num_computed_tokens[slots] = 0
        self.sampling.release(slots)
        for slot in slots.tolist():
            self.tokens[slot] = np.empty(0, np.int32)

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        assert self.sequence_ids[slot] == FREE, f"slot {slot} is taken"
        tokens = unpack(admission.tokens)
        self.tokens[slot] = tokens
        self.sequence_ids[slot] = admission.sequence_id
        self.num_tokens[slot] = tokens.size
        self.num_computed_tokens[slot] = admission.num_computed_tokens
        self.max_length[slot] = admission.max_length
        self.sampling.admit(admission)
