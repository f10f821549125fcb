"""The limits that the scheduler plans within, as one frozen record of plain numbers.

Not what a user types (runtime/config.py): every `auto` is resolved by now, and one engine has one of these.
Units: tokens, blocks; per rank where not said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...topologies.exchange_choice import ExchangeRule
from ...topologies.kv_sizes import WINDOWED, sequence_blocks, tokens_held
from ...topologies.overlap_choice import NOTHING, OverlapFacts, choose_overlap

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """One cache group.

    Attributes:
        num_blocks: KV blocks of each rank in it.
        kind, window: what a row sees of its sequence, as in `kvcache.CacheGroup`; blocks that no later row sees are
            freed.
    """

    num_blocks: int
    kind: str = "full"
    window: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks} is not allowed; use an integer of at least 1")
        if self.is_windowed != (self.window > 0):
            raise ValueError(f"a cache group of kind {self.kind!r} cannot have window={self.window}")

    @property
    def is_windowed(self) -> bool:
        """True where a sequence does not keep all its blocks."""
        return self.kind in WINDOWED


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and how much memory there is. Values that cannot work raise ValueError with the fix.

    Attributes:
        num_ranks: attention replicas of the group (ranks, where `atp` is 1); each owns its requests and its blocks.
        groups: cache groups of the model; a token takes room in each of them.
        block_size: tokens a block.
        max_model_len: longest sequence, prompt and output.
        max_num_seqs: sequences that run at once on a rank: the slots of its batch.
        max_num_batched_tokens: most rows of a step.
        policy: `fcfs`, or `priority` (lower number first, then arrival).
        exchange: name of the exchange that every step uses, unless there is a rule.
        exchange_rule: tells it for each step.
        overlap_facts: what the choice of overlap depends on; None overlaps nothing.
        max_queued_requests: waiting requests of the whole group, beside one a slot; more are refused.
        eos_token_ids: tokens that end a sequence, unless it ignores them.
        max_chunk_tokens: most prompt tokens of one sequence in one step; None sets no limit but the step's. No engine
            option sets it: with it checks cut prompts where they want to.
    """

    num_ranks: int
    groups: tuple[GroupLimits, ...]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    exchange: str = "local"
    exchange_rule: ExchangeRule | None = None
    overlap_facts: OverlapFacts | None = None
    max_queued_requests: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    max_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "block_size", "max_num_seqs", "max_queued_requests", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; use an integer of at least 1")
        if not self.groups:
            raise ValueError("groups=() is not allowed; a model has at least one cache group")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len} is not allowed; use at least 2 (prompt and output)")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not known; use one of {', '.join(POLICIES)}")
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise ValueError(f"max_chunk_tokens={self.max_chunk_tokens} is not allowed; use at least 1, or None")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}, but "
                f"each sequence runs at least one token a step; raise the first or lower the second"
            )

    def way_of(self, kind: str, bucket: int) -> tuple[str, str]:
        """Return exchange and overlap of a step of `kind` with `bucket` rows on its fullest attention replica."""
        exchange = self.exchange if self.exchange_rule is None else self.exchange_rule.name(kind, bucket)
        facts = self.overlap_facts
        return exchange, NOTHING if facts is None else choose_overlap(exchange, bucket, facts)

    @cached_property
    def most_requests(self) -> int:
        """Requests that the group takes at once: a slot each for some, and those that wait."""
        return self.max_queued_requests + self.num_ranks * self.max_num_seqs

    @cached_property
    def capacity_tokens(self) -> int:
        """Tokens in KV that a sequence can reach when it has a rank for itself."""
        return min(self.group_capacity(group) for group in self.groups)

    @cached_property
    def most_length(self) -> int:
        """The most tokens of a sequence, prompt and output: the last one is never fed back, so it needs no KV."""
        return min(self.max_model_len, self.capacity_tokens + 1)

    def group_capacity(self, group: GroupLimits) -> int:
        """Return the tokens in KV that a sequence can reach as far as `group` is concerned."""
        if not group.is_windowed:
            return group.num_blocks * self.block_size
        # The last token of a sequence needs no KV.
        at_most = self.max_model_len - 1
        return tokens_held(group.kind, group.window, group.num_blocks, block_size=self.block_size, at_most=at_most)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Length of the block table of the longest sequence that can be admitted."""
        return self.blocks_for(min(self.capacity_tokens, self.max_model_len - 1))

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def group_needs(self, num_tokens: int) -> tuple[int, ...]:
        """Return the most blocks that a sequence of `num_tokens` tokens holds between steps, for each group."""
        return tuple(sequence_blocks(g.kind, g.window, num_tokens, self.block_size) for g in self.groups)

    def needs_of(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return `group_needs` of each of `num_tokens` [n], [G, n]."""
        needs: np.ndarray = np.minimum(-(-num_tokens // self.block_size), np.array(self.most_held)[:, None])
        return needs

    @cached_property
    def most_held(self) -> tuple[int, ...]:
        """The most blocks of each group that any sequence holds between steps."""
        return self.group_needs(self.max_model_len)
