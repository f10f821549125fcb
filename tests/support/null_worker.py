"""Workers without a model: they hold the batch, execute plans to the letter, and object to whatever a plan gets wrong.

Not torch and not fast. A "KV slot" stores which sequence and token was written there, so a row that would read another
sequence's block, or one that was never written, is caught. The next token is a function of (seed, position) alone.
Shapes: as in runtime/plan.py; G cache groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moewe.kvcache.groups import first_visible
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    Admission,
    PromptLogprobs,
    RankPlan,
    RankResult,
    StepHeader,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack,
    unpack,
)
from moewe.runtime.scheduler import Request, Scheduler, SchedulerConfig, SequenceUpdate

VOCABULARY = 50
EOS = 0


def next_token(seed: int, position: int) -> int:
    """Return the token at `position` of a sequence; EOS about once in VOCABULARY."""
    return (seed * 1_000_003 + position * 7_919 + seed * position * 31 + (position >> 3)) % 9_973 % VOCABULARY


def expected_tokens(request: Request) -> list[int]:
    """Return all tokens that `request` must generate; `request.max_length` must be set."""
    tokens: list[int] = []
    for position in range(len(request.prompt_token_ids), request.max_length):
        tokens.append(next_token(request.seed, position))
        if tokens[-1] == EOS and not request.params.ignore_eos:
            break
    return tokens


def make_request(name: str, prompt: int, max_tokens: int | None = None, **fields: object) -> Request:
    """Return a request of `prompt` tokens that ignores EOS; `fields` go to SamplingParams or Request."""
    params = {"ignore_eos": True, "logprobs": None, "prompt_logprobs": None, "structured": None}
    params |= {key: fields.pop(key) for key in list(fields) if key in params}
    seed = int(fields.pop("seed", sum(map(ord, name))))  # type: ignore[call-overload]
    ids = np.array([(seed + 3 * i) % 1000 for i in range(prompt)], np.int32)
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(name, ids, sampling, seed=seed, **fields)  # type: ignore[arg-type]


@dataclass
class NullSequence:
    """What a worker knows of one slot.

    `planned` is `computed` as the scheduler believes it: it goes on behind an end that only the worker knows of.
    `tables` hold, for each cache group, block by index.
    """

    admission: Admission
    tokens: list[int]
    computed: int
    planned: int
    tables: list[dict[int, int]]
    decoding: bool = False
    finished: bool = False


@dataclass
class NullRank:
    """One rank; `run` is its whole life. `errors` maps a seed to the position whose logits are not finite."""

    config: SchedulerConfig
    errors: dict[int, int] = field(default_factory=dict)
    slots: dict[int, NullSequence] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        sizes = [group.num_blocks * self.config.block_size for group in self.config.groups]
        self.kv_sequence, self.kv_token = ([np.full(size, -1) for size in sizes] for _ in range(2))

    def run(self, header: StepHeader, plan: RankPlan) -> RankResult:
        """Apply `plan` in field order, run its rows, and answer."""
        self._change_batch(header, plan)
        sequences = list(self.slots.items())
        held = unpack(plan.held).tolist()
        assert all(self.slots[slot].decoding for slot in held), "a slot is held that does not decode"
        decodes = [slot for slot, s in sequences if s.decoding and not s.finished and slot not in held]
        most = sum(s.decoding for slot, s in sequences if slot not in held)
        assert len(decodes) <= plan.num_decodes <= most, (decodes, plan.num_decodes, most)
        assert plan.num_rows <= min(header.bucket, self.config.max_num_batched_tokens), plan
        runs = [(slot, self.slots[slot].computed, 1, True) for slot in decodes]
        assert len({c.slot for c in plan.chunks}) == len(plan.chunks), "two chunks of one slot"
        for chunk in plan.chunks:
            sequence = self.slots[chunk.slot]
            assert not sequence.decoding and chunk.start == sequence.computed and chunk.num_tokens >= 1, (
                chunk,
                sequence,
            )
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(sequence.tokens)), (chunk, sequence)
            if not sequence.finished:
                runs.append((chunk.slot, chunk.start, chunk.num_tokens, chunk.samples))
        for chunk in plan.chunks:
            self.slots[chunk.slot].planned = chunk.start + chunk.num_tokens
        for slot, sequence in sequences:
            sequence.planned += sequence.decoding and slot not in held
        for slot, start, size, _ in runs:  # all rows of a layer are written before any is read
            self._write(self.slots[slot], start, start + size)
        for slot, start, size, _ in runs:
            self._read(self.slots[slot], start, start + size)
        prompts = [self._judge(slot, start, size) for slot, start, size, _ in runs]
        outcome = [(slot, *self._sample(self.slots[slot])) for slot, _, _, samples in runs if samples]
        ids = [self.slots[slot].admission.sequence_id for slot, _, _ in outcome]
        logprobs = tuple(
            TokenLogprobs(sequence_id=i, token_ids=(token,), logprobs=(-0.5,), rank=1)
            for i, (slot, token, _) in zip(ids, outcome, strict=True)
            if self.slots[slot].admission.sampling.num_logprobs >= 0
        )
        flags = np.array([flag for _, _, flag in outcome])
        got_tokens = np.array([token is not None for _, token, _ in outcome], np.int64)
        return RankResult(
            step=header.step,
            slots=pack(np.array([slot for slot, _, _ in outcome])),
            sequence_ids=pack(np.array(ids), "<i8"),
            tokens=pack(np.array([token for _, token, _ in outcome if token is not None])),
            counts=b"" if got_tokens.all() else pack(got_tokens),
            prompt_logprobs=tuple(piece for piece in prompts if piece is not None),
            flags=pack(flags, "u1") if flags.any() else b"",
            logprobs=logprobs,
            num_rows=sum(size for _, _, size, _ in runs),
        )

    def _change_batch(self, header: StepHeader, plan: RankPlan) -> None:
        if header.snapshot:
            self.slots.clear()
            assert not plan.released and not plan.num_decodes
        for slot in unpack(plan.released).tolist():
            del self.slots[slot]  # KeyError: released twice, or never admitted
        for admission in plan.admitted:
            assert admission.slot not in self.slots, f"slot {admission.slot} is taken"
            assert 0 <= admission.slot < self.config.max_num_seqs
            assert header.snapshot or (admission.sequence_id not in self.seen and not admission.num_computed_tokens)
            self.seen.add(admission.sequence_id)
            tokens = unpack(admission.tokens).tolist()
            assert 0 < len(tokens) <= admission.max_length <= self.config.max_model_len
            computed = admission.num_computed_tokens
            tables: list[dict[int, int]] = [{} for _ in self.config.groups]
            self.slots[admission.slot] = NullSequence(admission, tokens, computed, computed, tables)
        for sequence in self.slots.values():
            for group, table in enumerate(sequence.tables):
                for index in [i for i in table if i < self._first_block(group, sequence.planned)]:
                    del table[index]
        used = [{b for s in self.slots.values() for b in s.tables[g].values()} for g in range(len(self.config.groups))]
        for group, slot, index, block in unpack(plan.grants).reshape(-1, 4).tolist():
            assert 0 <= block < self.config.groups[group].num_blocks
            assert block not in used[group], f"block {block} of group {group} is in use"
            used[group].add(block)
            sequence = self.slots[slot]
            table = sequence.tables[group]
            assert index == max(table, default=self._first_block(group, sequence.planned) - 1) + 1, "a gap in a table"
            table[index] = block

    def _first_block(self, group: int, position: int) -> int:
        limits = self.config.groups[group]
        return first_visible(limits.kind, limits.window, position) // self.config.block_size

    def _places(self, group: int, sequence: NullSequence, positions: np.ndarray) -> np.ndarray:
        size = self.config.block_size
        return np.array([sequence.tables[group][i // size] * size + i % size for i in positions.tolist()], np.int64)

    def _write(self, sequence: NullSequence, start: int, end: int) -> None:
        for group, table in enumerate(sequence.tables):
            held = range(self._first_block(group, start), -(-end // self.config.block_size))
            assert sorted(table) == list(held), f"group {group} holds {sorted(table)} for rows {start} to {end}"
            places = self._places(group, sequence, np.arange(start, end))
            self.kv_sequence[group][places] = sequence.admission.sequence_id
            self.kv_token[group][places] = sequence.tokens[start:end]

    def _read(self, sequence: NullSequence, start: int, end: int) -> None:
        for group, limits in enumerate(self.config.groups):
            first = first_visible(limits.kind, limits.window, start)  # later rows see nothing before it
            places = self._places(group, sequence, np.arange(first, end))
            assert (self.kv_sequence[group][places] == sequence.admission.sequence_id).all(), "reads another's KV"
            assert self.kv_token[group][places].tolist() == sequence.tokens[first:end], "KV holds other tokens"
        sequence.computed = end

    def _judge(self, slot: int, start: int, size: int) -> PromptLogprobs | None:
        """Report what was asked of the prompt in rows [start, start + size): each token is as likely as its place."""
        admission = self.slots[slot].admission
        tokens = unpack(admission.tokens)
        num_prompt = len(tokens) if admission.num_prompt_tokens < 0 else admission.num_prompt_tokens
        first, end = max(start + 1, admission.prompt_logprobs_from), min(start + size + 1, num_prompt)
        if admission.sampling.num_prompt_logprobs < 0 or first >= end:
            return None
        return PromptLogprobs(
            slot=slot,
            sequence_id=admission.sequence_id,
            start=first,
            token_ids=pack(tokens[first:end]),
            logprobs=pack(-np.arange(first, end), "<f4"),
            ranks=pack(np.ones(end - first)),
        )

    def _sample(self, sequence: NullSequence) -> tuple[int | None, int]:
        sampling, position = sequence.admission.sampling, len(sequence.tokens)
        assert sequence.computed == position and not sequence.finished
        if position == sequence.admission.max_length:
            sequence.decoding = sequence.finished = True
            return None, FINISH_LENGTH
        token, flag = next_token(sampling.seed, position), FINISH_NONE
        if self.errors.get(sampling.seed) == position:
            flag = FINISH_ERROR
        elif token in sampling.eos_token_ids:
            flag = FINISH_STOP
        elif position + 1 >= sequence.admission.max_length:
            flag = FINISH_LENGTH
        sequence.tokens.append(token)
        sequence.decoding, sequence.finished = True, flag != FINISH_NONE
        return token, flag


class NullEngine:
    """A scheduler and its null workers, stepped as the engine steps, planned ahead by `depth`, checked throughout."""

    def __init__(self, config: SchedulerConfig, *, depth: int = 2, errors: dict[int, int] | None = None) -> None:
        self.scheduler, self.depth = Scheduler(config, clock=lambda: 1.0 + self.num_steps), depth
        self.ranks = [NullRank(config, errors or {}) for _ in range(config.num_ranks)]
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.prompt_logprobs: dict[str, list[PromptLogprobs]] = {}

    @property
    def num_steps(self) -> int:
        return len(self.plans)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.tokens[request.request_id] = []
            self.scheduler.check_invariants()

    def step(self) -> list[SequenceUpdate]:
        """Plan, and apply the oldest step once `depth` are in flight or there is nothing to plan."""
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if plan is not None:
            self.submit(plan)
        return self.collect() if self.in_flight and (plan is None or len(self.in_flight) >= self.depth) else []

    def submit(self, plan: StepPlan) -> None:
        assert plan.header.step == self.num_steps and len(plan.ranks) == len(self.ranks)
        assert plan.header.bucket == max(rank.num_rows for rank in plan.ranks)
        self.plans.append(plan)
        self.in_flight.append(plan)

    def collect(self) -> list[SequenceUpdate]:
        plan = self.in_flight.popleft()
        results = [rank.run(plan.header, part) for rank, part in zip(self.ranks, plan.ranks, strict=True)]
        updates = self.scheduler.apply(StepResult(step=plan.header.step, ranks=tuple(results)))
        self.scheduler.check_invariants()
        for update in updates:
            name = update.request.request_id
            assert name not in self.reasons, f"{name} goes on after its end"
            assert not (update.prompt_logprobs and self.tokens[name]), "the prompt is told before the output"
            self.tokens[name] += update.token_ids
            self.prompt_logprobs.setdefault(name, []).extend(update.prompt_logprobs)
            assert self.tokens[name] == update.request.generated
            if update.finish_reason is not None:
                self.reasons[name] = update.finish_reason
        return updates

    def run(self, most_steps: int = 10_000) -> None:
        """Step until nothing is left; the books must balance then."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not idle after {most_steps} steps"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not any(self.scheduler.used_blocks_per_rank)

    def check_tokens(self, requests: Iterable[Request], *, except_for: Iterable[str] = ()) -> None:
        """Assert that every request but `except_for` generated exactly what it must, and why it ended."""
        left_out = set(except_for)
        for request in requests:
            if request.request_id in left_out:
                continue
            expected = expected_tokens(request)
            assert self.tokens[request.request_id] == expected, request.request_id
            stopped = expected and expected[-1] == EOS and not request.params.ignore_eos
            assert self.reasons[request.request_id] == ("stop" if stopped else "length")
