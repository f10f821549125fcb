"""What ranks touch, worked out the long way: from what routers chose, which rows ran, and the tensors that they hold.

Not the counters and nothing of their arithmetic: sizes are those of storages, one expert, token and row at a time, and
operations follow from the widths in the config. A group is watched from its first step to its last; the phase of a step
follows from where its rows stand in their prompts. `sent` has the ways of rows between ranks.
Units: bytes; operations of products, two for a multiplication and an addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from moewe.models.config import ModelConfig
from moewe.telemetry import COMPONENTS, PHASES, SCOPES, RankCounters
from tests.support.harness import Group
from tests.support.sent import Wire, sent_in_layer

ATTENTION = ("input_norm", "input_norm_bias", "qkv", "qkv_bias", "latent", "o", "o_bias", "q_norm", "k_norm", "sinks")


Table = dict[str, dict[str, int]]  # phase -> component -> bytes or operations


@dataclass
class Ran:
    """One step of one rank: rows that attended, rows that sample, and what routers chose for its own, by MoE layer."""

    positions: list[int]
    sequences: list[int]
    num_prompt_rows: int
    num_sampled: int
    choices: dict[int, list[list[int]]]


def all_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in records and lists, however deep."""
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, list | tuple):
        for child in node:
            yield from all_tensors(child)
    elif hasattr(node, "__dict__"):
        for child in vars(node).values():
            yield from all_tensors(child)


def nbytes(*nodes: Any) -> int:
    """Return what the tensors take in memory."""
    return sum(t.numel() * t.element_size() for node in nodes for t in all_tensors(node))


class Watched:
    """Books every step of a group.

    Args:
        group: fresh; its layers run one by one from now on, with the same bits.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.steps: list[list[Ran]] = [[] for _ in group.workers]
        self._wire = self._make_wire()
        self._sent: dict[int, list[list[int]]] = {}
        self._chosen: list[dict[int, list[list[int]]]] = [{} for _ in group.workers]
        for rank, worker in enumerate(group.workers):
            worker.decoder.observe_routing(partial(self._note_choice, rank))
            worker.observer = partial(self._note_rows, rank)

    def _note_choice(self, rank: int, layer: int, topk_ids: torch.Tensor) -> None:
        self._chosen[rank].setdefault(layer, []).extend(topk_ids.tolist())

    def _note_rows(self, rank: int, forward: Any, hidden: torch.Tensor, sequence_ids: np.ndarray) -> None:
        positions, sequences = forward.positions.tolist(), sequence_ids.tolist()
        # Tokens of an answer that come several at a time were computed before a preemption: a prompt's, as it were.
        ends = [len(self.group.outcomes[self.group._owner[sequence]].prompt) for sequence in sequences]
        many = {sequence for sequence in sequences if sequences.count(sequence) > 1}
        num_prompt_rows = sum(
            position < end or sequence in many
            for position, end, sequence in zip(positions, ends, sequences, strict=True)
        )
        choices, self._chosen[rank] = self._chosen[rank], {}
        self.steps[rank].append(Ran(positions, sequences, num_prompt_rows, len(forward.sample_rows), choices))

    def phases(self) -> list[str]:
        """Return the kind of each step, over all ranks."""
        kinds = []
        for step in zip(*self.steps, strict=True):
            prompts = any(ran.num_prompt_rows for ran in step)
            decodes = any(len(ran.positions) > ran.num_prompt_rows for ran in step)
            kinds.append("mixed" if prompts and decodes else "prefill" if prompts else "decode" if decodes else "idle")
        return kinds

    # --- bytes -------------------------------------------------------------------------------------------------------
    def bytes_of(self, rank: int) -> Table:
        """Return what a rank read and wrote, the exchange of experts included."""
        weights, table = self.group.workers[rank].decoder._weights, _nothing()
        layers = weights.layers
        for number, (phase, ran) in enumerate(zip(self.phases(), self.steps[rank], strict=True)):
            moved, own_rows = table[phase], self._own_rows(rank, ran)
            if ran.positions:
                moved["attention"] += sum(nbytes(getattr(layer, n)) for layer in layers for n in ATTENTION)
                moved["kv"] += self._kv_bytes(rank, ran)
            if own_rows:
                moved["dense"] += self._dense_bytes(rank) + own_rows * self._row_bytes(rank)
                moved["activations"] += 4 * len(layers) * own_rows * self._row_bytes(rank)
                moved["shared"] += sum(
                    nbytes(layer.moe.shared, layer.moe.shared_gate) for layer in layers if layer.moe is not None
                )
            if ran.num_sampled and rank % self.group.atp == 0:
                moved["dense"] += nbytes(weights.head, weights.head_bias)
            moved["routed"] += sum(self._slot_bytes(rank, layer, slot) for layer, _, slot in self.hit(rank, number))
            moved["exchange"] += sum(self._sent_in(number)[rank][1:])
        return table

    def sent_by(self, rank: int) -> list[int]:
        """Return bytes sent by scope."""
        steps = [self._sent_in(number)[rank] for number in range(len(self.steps[rank]))]
        return [sum(step[scope] for step in steps) for scope in range(len(SCOPES))]

    def hit(self, rank: int, number: int) -> set[tuple[int, int, int]]:
        """Return MoE layer, half and slot (of the rank) that anybody's rows chose in a step; halves read each anew."""
        start, stop = self.group.placement.slot_ranges[rank]
        return {
            (layer, half, slot - start)
            for layer, half, _, slots in self._choices(number)
            for slot in slots
            if start <= slot < stop
        }

    def _choices(self, number: int) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield MoE layer, half, rank and slots of each row of a step; one in the middle is of a rank's first half."""
        is_halved = self.group.steps[number].overlap == "halves"
        for source, own in enumerate(self.steps):
            for layer, tokens in own[number].choices.items():
                for row, experts in enumerate(tokens):
                    half = int(is_halved and row >= (len(tokens) + 1) // 2)
                    yield layer, half, source, [self._slot(source, layer, e) for e in experts if e >= 0]

    def _slot(self, source: int, layer: int, expert: int) -> int:
        """The slot that rows of a rank use for an expert: of those that hold it, one that is nearest."""
        placement, wire = self.group.placement, self._wire
        slot = int(placement.slot_of[layer, source, expert])
        holders = np.flatnonzero(placement.physical_to_logical[layer] == expert).tolist()
        scopes = {holder: wire.scope(source, int(placement.slot_rank[holder])) for holder in holders}
        assert scopes[slot] == min(scopes.values()), (source, layer, expert, slot, scopes)
        return slot

    def _sent_in(self, number: int) -> list[list[int]]:
        """Bytes of a step by rank and scope: each half of each MoE layer is an exchange, on ranks without rows too."""
        if number not in self._sent:
            placement, ranks = self.group.placement, range(len(self.steps))
            halves = 2 if self.group.steps[number].overlap == "halves" else 1
            owners: dict[tuple[int, int], list[list[list[int]]]] = {
                (layer, half): [[] for _ in ranks] for layer in range(placement.num_layers) for half in range(halves)
            }
            for layer, half, source, slots in self._choices(number):
                owners[layer, half][source].append([int(placement.slot_rank[slot]) for slot in slots])
            wire = self._wire
            if self.group.setup.exchange == "padded":  # of small steps only
                wire = replace(wire, exchange=self.group.steps[number].exchange)
            parts = [sent_in_layer(wire, part) for part in owners.values()]
            self._sent[number] = [
                [sum(part[rank][scope] for part in parts) for scope in range(len(SCOPES))] for rank in ranks
            ]
        return self._sent[number]

    def _make_wire(self) -> Wire:
        worker, setup = self.group.workers[0], self.group.setup
        row_bytes, width = self._row_bytes(0), worker.model_config.hidden_size
        domain_of = self.group.placement.rank_domain.tolist()
        return Wire(
            exchange=worker.decoder._exchange.name,
            row_bytes=row_bytes,
            written_bytes=width + 4 * -(-width // 128) if setup.exchange_payload == "fp8" else row_bytes,
            top_k=self.group.top_k,
            domains=tuple(
                tuple(rank for rank, domain in enumerate(domain_of) if domain == number)
                for number in range(max(domain_of) + 1)
            ),
        )

    def _own_rows(self, rank: int, ran: Ran) -> int:
        """Rows between attentions: those of one rank, or its part where ranks divide heads."""
        atp, rows = self.group.atp, len(ran.positions)
        return rows // atp + (rank % atp < rows % atp)

    def _slot_bytes(self, rank: int, layer: int, slot: int) -> int:
        experts = [
            each.moe.experts for each in self.group.workers[rank].decoder._weights.layers if each.moe is not None
        ]
        return sum(tensor[slot].numel() * tensor.element_size() for tensor in all_tensors(experts[layer]))

    def _row_bytes(self, rank: int) -> int:
        worker = self.group.workers[rank]
        return worker.model_config.hidden_size * worker.number_format.itemsize

    def _dense_bytes(self, rank: int) -> int:
        decoder = self.group.workers[rank].decoder
        total = nbytes(decoder._weights.final_norm, decoder._weights.final_norm_bias)
        for layer, made in zip(decoder._weights.layers, decoder._layers, strict=True):
            total += nbytes(layer.post_attention_norm, layer.post_attention_norm_bias, layer.dense)
            if made.moe is not None:
                native = made.moe._router_native
                matrix = made.moe._router if native is None else native.packed
                total += nbytes(matrix, layer.moe.selection_bias)
                if layer.moe.router_bias is not None:
                    total += 4 * layer.moe.router_bias.numel()  # it is added in fp32
        return total

    def _kv_bytes(self, rank: int, ran: Ran) -> int:
        storage, total = self.group.workers[rank].storage, 0
        for layer in range(self.group.model.num_layers):
            group = storage.groups[storage.group_of(layer)]
            a_token, places = 0, set()
            for pages in storage.pages(layer):
                if pages.elements.data_ptr() not in places:  # the values of latents lie in their keys
                    a_token += nbytes(pages.elements[0, 0], None if pages.scales is None else pages.scales[0, 0])
                places.add(pages.elements.data_ptr())
            read = {
                (sequence, token)
                for sequence, position in zip(ran.sequences, ran.positions)
                for token in range(position + 1)
                if sees(group.kind, group.window, position, token)
            }
            total += (len(read) + len(ran.positions)) * a_token
        return total

    # --- operations --------------------------------------------------------------------------------------------------
    def flops_of(self, rank: int) -> Table:
        """Return the operations of a rank's products."""
        worker = self.group.workers[rank]
        config, own = worker.model_config, worker._own_config
        moe, width = config.moe, config.hidden_size
        table = _nothing()
        start, stop = self.group.placement.slot_ranges[rank]
        for number, (phase, ran) in enumerate(zip(self.phases(), self.steps[rank], strict=True)):
            flops, rows = table[phase], self._own_rows(rank, ran)
            flops["attention"] += len(ran.positions) * config.num_layers * projection_flops(own)
            flops["kv"] += self._score_flops(rank, own, ran)
            flops["dense"] += rows * (config.num_layers - len(config.moe_layers)) * 6 * width * config.dense_width
            if rank % self.group.atp == 0:
                flops["dense"] += ran.num_sampled * 2 * width * config.vocab_size
            if moe is None:
                continue
            flops["dense"] += rows * len(config.moe_layers) * 2 * width * moe.routing.num_experts
            shared = 6 * width * moe.shared_width + 2 * width * moe.shared_gate
            flops["shared"] += rows * len(config.moe_layers) * shared
            here = sum(start <= slot < stop for _, _, _, slots in self._choices(number) for slot in slots)
            flops["routed"] += here * 6 * width * moe.expert_width
        return table

    def _score_flops(self, rank: int, own: ModelConfig, ran: Ran) -> int:
        storage, total = self.group.workers[rank].storage, 0
        latent = own.latent
        widths = 2 * own.head_dim if latent is None else 2 * latent.kv_rank + latent.rope_dim
        for layer in range(own.num_layers):
            group = storage.groups[storage.group_of(layer)]
            pairs = sum(
                sees(group.kind, group.window, position, token)
                for position in ran.positions
                for token in range(position + 1)
            )
            total += 2 * own.num_heads * widths * pairs
        return total


def sees(kind: str, window: int, position: int, token: int) -> bool:
    """Tell whether a row at `position` sees `token`."""
    if kind == "window":
        return position - window < token <= position
    return token <= position and (kind != "chunk" or token // window == position // window)


def projection_flops(config: ModelConfig) -> int:
    """Return the operations of a row in the projections of one layer's attention."""
    heads, width, latent = config.num_heads, config.hidden_size, config.latent
    if latent is None:
        return 2 * width * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    query = latent.nope_dim + latent.rope_dim
    numbers = width * (latent.kv_rank + latent.rope_dim) + heads * latent.value_dim * width
    numbers += heads * latent.kv_rank * (latent.nope_dim + latent.value_dim)
    if latent.query_rank:
        numbers += width * latent.query_rank + latent.query_rank * heads * query
    else:
        numbers += width * heads * query
    return 2 * numbers


def counted_bytes(counters: RankCounters) -> Table:
    """Return what a rank counted."""
    return {phase: dict(zip(COMPONENTS, row)) for phase, row in zip(PHASES, counters.bytes_moved.tolist())}


def counted_flops(counters: RankCounters) -> Table:
    """Return the operations that a rank counted."""
    return {phase: dict(zip(COMPONENTS, row)) for phase, row in zip(PHASES, counters.flops.tolist())}


def _nothing() -> Table:
    return {phase: dict.fromkeys(COMPONENTS, 0) for phase in PHASES}
