"""The byte budget of one rank, line by line, and refusals that name the fix.

Not an allocator: it says what a launch will need before anything is loaded; activations and the reserve are estimates.
Units: bytes of the fullest rank. T rows of a step, K top-k, D width, F expert width, S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import kv_sizes
from .footprint import ModelFootprint
from .grid import slot_ranges
from .kv_sizes import KVGroup, StepLimits
from .spec import Topology, TopologyError

# Experts that move at once, and the bytes that a rank holds aside for them.
MOST_MOVES, MOST_ASIDE_BYTES = 8, 256 << 20
# Interpreter and libraries of a rank's process; measured near 300 MiB with torch on CPU.
RESERVE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class BudgetLine:
    """One line: `kind` is `weights`, `kv`, `buffers` or `reserve`."""

    name: str
    kind: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ByteBudget:
    """What the fullest rank of `topology` needs.

    Attributes:
        footprint, topology, limits: what was asked for.
        lines: the parts, in the order in which they are printed.
        rank_memory_bytes: what a rank may use.
        num_blocks: KV blocks of a rank in a cache group that keeps whole sequences.
    """

    footprint: ModelFootprint
    topology: Topology
    limits: StepLimits
    lines: tuple[BudgetLine, ...]
    rank_memory_bytes: int
    num_blocks: int

    def of_kind(self, kind: str) -> int:
        """Return the bytes of all lines of `kind`."""
        return sum(line.num_bytes for line in self.lines if line.kind == kind)

    @property
    def total(self) -> int:
        """All lines."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def kv_bytes(self) -> int:
        """KV of a rank."""
        return self.of_kind("kv")

    @property
    def fixed_bytes(self) -> int:
        """All lines but KV."""
        return self.total - self.kv_bytes

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The cache groups as one rank holds them."""
        return kv_sizes.shared_groups(self.footprint.kv_groups, self.topology.atp)

    @property
    def group_blocks(self) -> tuple[int, ...]:
        """KV blocks of a rank in each cache group."""
        return kv_sizes.group_blocks(self.kv_groups, self.limits, self.num_blocks)

    @property
    def longest_sequence(self) -> int:
        """The longest sequence that a rank's KV holds, at most `max_model_len`."""
        return kv_sizes.longest_sequence(self.kv_groups, self.limits, self.num_blocks)

    def max_concurrency(self, tokens: int) -> int:
        """Return how many sequences of `tokens` tokens fit at once over all ranks."""
        a_rank = kv_sizes.max_concurrency(self.kv_groups, self.limits, self.num_blocks, tokens)
        return a_rank * self.topology.adp * self.topology.dp

    def sequences_held(self, lengths: Sequence[int]) -> int:
        """Return how many sequences of these lengths fit at once, as if all ranks had one KV; the shortest first."""
        replicas = self.topology.adp * self.topology.dp
        blocks = [replicas * n for n in self.group_blocks]
        return kv_sizes.sequences_held(self.kv_groups, self.limits, blocks, lengths)

    def table(self) -> str:
        """Return the budget as text, one line a part."""
        width = max(len(line.name) for line in self.lines)
        who = "each rank" if self.topology.ep == 1 else "the fullest rank"
        rows = [f"bytes of {who} ({self.footprint.name}, {self.topology.short()})"]
        rows += [f"  {line.name:{width}}  {format_bytes(line.num_bytes):>11}" for line in self.lines]
        rows.append(f"  {'total':{width}}  {format_bytes(self.total):>11}  of {format_bytes(self.rank_memory_bytes)}")
        length, block_size = self.limits.max_model_len, self.limits.block_size
        blocks = ", ".join(
            f"{group.name} {n:,} ({n * block_size:,} tokens)" for group, n in zip(self.kv_groups, self.group_blocks)
        )
        rows.append(
            f"  KV blocks of {block_size} tokens a rank: {blocks}; "
            f"max concurrency at {length:,} tokens: {self.max_concurrency(length):,} "
            f"(at most {self.limits.max_num_seqs * self.topology.adp * self.topology.dp:,} sequences at once)"
        )
        return "\n".join(rows)


def format_bytes(number: int) -> str:
    """Return `number` with a binary unit and about four digits, e.g. `1.25 GiB`."""
    value, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{number:,} B" if units[0] == "B" else f"{value:,.2f} {units[0]}"


def byte_budget(
    footprint: ModelFootprint,
    topology: Topology,
    limits: StepLimits,
    *,
    rank_memory_bytes: int,
    kv_bytes: int | None = None,
) -> ByteBudget:
    """Return what the fullest rank needs.

    Args:
        footprint: what the model weighs.
        topology: how it is laid out.
        limits: of a step and a sequence.
        rank_memory_bytes: what a rank may use.
        kv_bytes: KV of a rank; None takes what is left, but no more than `max_num_seqs` full sequences need.
    """
    lines = [*_weights(footprint, topology), *_buffers(footprint, topology, limits)]
    reserve = BudgetLine(name="reserve (process, libraries)", kind="reserve", num_bytes=RESERVE_BYTES)
    groups = kv_sizes.shared_groups(footprint.kv_groups, topology.atp)
    if kv_bytes is None:
        left = rank_memory_bytes - RESERVE_BYTES - sum(line.num_bytes for line in lines)
        num_blocks = min(kv_sizes.blocks_in(groups, limits, left), kv_sizes.most_useful(groups, limits))
    else:
        num_blocks = kv_sizes.blocks_in(groups, limits, kv_bytes)
    lines += [*_kv(groups, limits, num_blocks), reserve]
    return ByteBudget(
        footprint=footprint,
        topology=topology,
        limits=limits,
        lines=tuple(line for line in lines if line.num_bytes),
        rank_memory_bytes=rank_memory_bytes,
        num_blocks=num_blocks,
    )


def _kv(groups: tuple[KVGroup, ...], limits: StepLimits, num_blocks: int) -> list[BudgetLine]:
    blocks = kv_sizes.group_blocks(groups, limits, num_blocks)
    return [
        BudgetLine(
            name="KV cache" if len(groups) == 1 else f"KV cache, {group.name} ({len(groups)} groups)",
            kind="kv",
            num_bytes=n * group.bytes_per_token * limits.block_size,
        )
        for group, n in zip(groups, blocks, strict=True)
    ]


def _weights(footprint: ModelFootprint, topology: Topology) -> list[BudgetLine]:
    per_slot = footprint.num_moe_layers * footprint.expert_bytes
    once = _most_slots(footprint.num_experts, topology.ep)
    slots = _most_slots(footprint.num_experts + topology.red, topology.ep) if footprint.num_experts else 0
    parts = [
        ("attention weights", footprint.attention_bytes_at(topology.atp)),
        ("dense FFN, routers, norms", footprint.dense_bytes),
        ("shared experts", footprint.shared_bytes),
        ("embedding", footprint.embedding_bytes),
        ("output head", footprint.head_bytes),
        (f"routed experts ({once} of {footprint.num_experts} a layer)", once * per_slot),
        (f"redundant expert slots ({slots - once} a layer)", (slots - once) * per_slot),
    ]
    return [BudgetLine(name=name, kind="weights", num_bytes=num_bytes) for name, num_bytes in parts]


def _buffers(footprint: ModelFootprint, topology: Topology, limits: StepLimits) -> list[BudgetLine]:
    row = footprint.hidden_size * footprint.activation_itemsize
    tokens, exchange, inner = limits.max_num_batched_tokens, 0, 0
    if footprint.num_experts:
        # Nothing is dropped, so the bound is the worst case: every token of the group routed to this rank. Ranks of an
        # attention replica run the same rows, and each of them sends its part.
        slots = _most_slots(footprint.num_experts + topology.red, topology.ep)
        received = topology.adp * tokens * min(footprint.top_k, slots)
        sent = -(-tokens // topology.atp) * footprint.top_k if topology.ep > 1 else 0
        exchange = 2 * (received + sent) * row + (2 * tokens * row if topology.atp > 1 else 0)
        # gate, up and their product (3F) of the rows of one expert; an expert's weights are 3 * F * D.
        inner = topology.adp * tokens * (footprint.expert_bytes // max(1, footprint.hidden_size))
    logits = 2 * min(limits.max_num_seqs, tokens) * footprint.vocab_size * 4
    lines = [
        BudgetLine(name="exchange buffers (worst case)", kind="buffers", num_bytes=exchange),
        BudgetLine(name="activations (estimate)", kind="buffers", num_bytes=8 * tokens * row + inner + logits),
    ]
    lines.append(BudgetLine(name="CUDA graphs (estimate)", kind="buffers", num_bytes=limits.graph_bytes))
    if limits.has_tables:
        tables = kv_sizes.table_bytes(len(footprint.kv_groups), limits)
        lines.append(BudgetLine(name="block tables (worst case)", kind="buffers", num_bytes=tables))
    if limits.moves_experts and footprint.num_experts and topology.ep > 1:
        aside = most_moves(footprint.expert_bytes) * footprint.expert_bytes
        lines.append(BudgetLine(name="experts on their way (eplb auto)", kind="buffers", num_bytes=aside))
    return lines


def most_moves(expert_bytes: int) -> int:
    """Return how many experts of so many bytes may move at once: a rank holds them aside; two can change places."""
    return max(2, min(MOST_MOVES, MOST_ASIDE_BYTES // max(1, expert_bytes)))


def _most_slots(num_slots: int, num_ranks: int) -> int:
    return max(stop - start for start, stop in slot_ranges(num_slots, num_ranks))


def check_runnable(
    topology: Topology, *, num_experts: int, num_ranks_available: int | None = None, unit: str = "rank"
) -> None:
    """Refuse what cannot run whatever the memory.

    Args:
        topology: what was asked for.
        num_experts: E of the model, 0 when dense.
        num_ranks_available: how many ranks the machine has places for; None when it has no such limit (CPU).
        unit: what a place is called, e.g. `GPU`.

    Raises:
        TopologyError: names the value and a topology or flag that would do.
    """
    name = topology.short()
    if num_experts == 0 and topology.ep > 1:
        raise TopologyError(
            f"{name} splits experts over {topology.ep} ranks, but the model is dense; use EP1DP{topology.num_ranks}"
        )
    # More would make a rank hold an expert twice, which helps nobody.
    most_redundant = num_experts * (topology.ep - 1)
    if topology.red > most_redundant:
        raise TopologyError(
            f"red={topology.red} is more than replicas on other ranks can use ({num_experts} experts on {topology.ep} "
            f"ranks); use red={most_redundant}" + (" or less" if most_redundant else "")
        )
    if 0 < num_experts < topology.ep:
        raise TopologyError(
            f"{name} needs at least {topology.ep} experts, the model has {num_experts}; use EP{num_experts}DP1"
        )
    if num_ranks_available is not None and topology.num_ranks > num_ranks_available:
        fitting = min(topology.ep, num_ranks_available)
        raise TopologyError(
            f"{name} needs {topology.num_ranks} {unit}s ({topology.dp} x {topology.ep}), this machine has "
            f"{num_ranks_available}; did you mean EP{fitting}DP{num_ranks_available // max(1, fitting) or 1}?"
        )


def check_fits(budget: ByteBudget, *, host_bytes: int | None = None) -> None:
    """Refuse a budget that does not fit.

    Args:
        budget: from `byte_budget`.
        host_bytes: memory that all ranks share (CPU); None when each rank has its own (GPU).

    Raises:
        TopologyError: one line that names what is short and the nearest setting that fits.
    """
    memory = format_bytes(budget.rank_memory_bytes)
    name = budget.topology.short()
    if budget.fixed_bytes > budget.rank_memory_bytes:
        raise TopologyError(
            f"{budget.footprint.name} on {name} needs {format_bytes(budget.fixed_bytes)} a rank before any KV "
            f"({format_bytes(budget.of_kind('weights'))} of it weights), a rank may use {memory}; "
            f"{_fix(budget, host_bytes)}"
        )
    groups, limits = budget.kv_groups, budget.limits
    if budget.total > budget.rank_memory_bytes:
        fitting = kv_sizes.blocks_in(groups, limits, budget.rank_memory_bytes - budget.fixed_bytes)
        most = kv_sizes.kv_bytes(groups, limits, fitting)
        raise TopologyError(
            f"--kv-cache-memory-bytes {budget.kv_bytes} does not fit on {name}: a rank may use {memory} and everything "
            f"else takes {format_bytes(budget.fixed_bytes)}; use at most {most}"
        )
    longest = budget.longest_sequence
    if longest < limits.max_model_len:
        need = kv_sizes.kv_bytes(groups, limits, kv_sizes.blocks_to_hold(groups, limits))
        remedy = f"use --max-model-len {longest} or " if longest else ""
        raise TopologyError(
            f"KV of {format_bytes(budget.kv_bytes)} holds {longest:,} tokens, less than one sequence of "
            f"max_model_len={limits.max_model_len:,}; {remedy}give --kv-cache-memory-bytes at least {need}"
        )


def _fix(budget: ByteBudget, host_bytes: int | None) -> str:
    """Return the nearest change that makes the fixed part fit, as an instruction."""
    tokens = budget.limits.max_num_batched_tokens // 2
    while tokens >= 64:
        fewer = replace(budget.limits, max_num_batched_tokens=tokens)
        if _fits(budget, budget.topology, budget.rank_memory_bytes, limits=fewer):
            return f"use --max-num-batched-tokens {tokens}"
        tokens //= 2
    topology = budget.topology
    if host_bytes is None:
        for ep in range(topology.ep + 1, budget.footprint.num_experts + 1):
            wider = replace(topology, ep=ep, adp=ep, atp=1)
            if _fits(budget, wider, budget.rank_memory_bytes):
                return f"use {wider.short()} or wider ({wider.num_ranks} ranks of this size)"
    else:
        narrower = [(topology.ep, dp) for dp in range(topology.dp - 1, 0, -1)]
        narrower += [(ep, 1) for ep in range(topology.ep - 1, 0, -1)]
        for ep, dp in narrower:
            smaller = replace(topology, ep=ep, dp=dp, adp=ep, atp=1)
            if _fits(budget, smaller, host_bytes // smaller.num_ranks):
                return f"use {smaller.short()}, whose ranks share this host's memory better"
    if budget.footprint.activation_itemsize == 4 and budget.fixed_bytes // 2 <= budget.rank_memory_bytes:
        return "use --dtype bfloat16"
    return "use a smaller model, or a machine with more memory"


def _fits(budget: ByteBudget, topology: Topology, rank_memory_bytes: int, limits: StepLimits | None = None) -> bool:
    other = byte_budget(
        budget.footprint, topology, limits or budget.limits, rank_memory_bytes=rank_memory_bytes, kv_bytes=0
    )
    return other.total < rank_memory_bytes
