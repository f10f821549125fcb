"""The limits that the scheduler plans within, as one frozen record of plain numbers.

Not what a user types (runtime/config.py): every `auto` is resolved by now, and one engine has one of these.
Units: tokens, blocks; per rank where not said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and how much memory there is. Values that cannot work raise ValueError with the fix.

    Attributes:
        num_ranks: attention ranks of the group; each owns its requests and its blocks.
        num_blocks: KV blocks of each rank in each cache group.
        block_size: tokens a block.
        max_model_len: longest sequence, prompt and output.
        max_num_seqs: sequences that run at once on a rank: the slots of its batch.
        max_num_batched_tokens: most rows of a step.
        policy: `fcfs`, or `priority` (lower number first, then arrival).
        exchange: name of the exchange that every step uses.
        max_queued_requests: waiting requests of the whole group, beside one a slot; more are refused.
        eos_token_ids: tokens that end a sequence, unless it ignores them.
        num_groups: cache groups, all of kind `full`.
        max_chunk_tokens: most prompt tokens of one sequence in one step; None sets no limit but the step's.
    """

    num_ranks: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    exchange: str = "local"
    max_queued_requests: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    num_groups: int = 1
    max_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        at_least_one = ("num_ranks", "num_blocks", "block_size", "max_num_seqs", "max_queued_requests", "num_groups")
        for name in (*at_least_one, "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; use an integer of at least 1")
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

    @property
    def most_requests(self) -> int:
        """Requests that the group takes at once: a slot each for some, and those that wait."""
        return self.max_queued_requests + self.num_ranks * self.max_num_seqs

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one rank's blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks of the longest sequence that can be admitted (its last token needs no KV)."""
        return min(self.num_blocks, self.blocks_for(self.max_model_len - 1))

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens in KV take."""
        return -(-num_tokens // self.block_size)
