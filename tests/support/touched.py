"""What ranks touch, worked out the long way: from what routers chose, which rows ran, and the tensors that they hold.

Not the counters and nothing of their arithmetic: sizes are those of storages, one expert, token and row at a time, and
operations follow from the widths in the config. A group is watched from its first step to its last.
Units: bytes; operations of products, two for a multiplication and an addition.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from moewe.models.config import ModelConfig
from moewe.telemetry import COMPONENTS, SCOPES, RankCounters
from tests.support.harness import Group

ATTENTION = ("input_norm", "input_norm_bias", "qkv", "qkv_bias", "latent", "o", "o_bias", "q_norm", "k_norm", "sinks")


@dataclass
class Ran:
    """One step of one rank: rows that attended, rows that sample, and what routers chose for its own, by MoE layer."""

    positions: list[int]
    sequences: list[int]
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
        self._chosen: list[dict[int, list[list[int]]]] = [{} for _ in group.workers]
        for rank, worker in enumerate(group.workers):
            worker.decoder.observe_routing(partial(self._note_choice, rank))
            worker.observer = partial(self._note_rows, rank)

    def _note_choice(self, rank: int, layer: int, topk_ids: torch.Tensor) -> None:
        self._chosen[rank].setdefault(layer, []).extend(topk_ids.tolist())

    def _note_rows(self, rank: int, forward: Any, hidden: torch.Tensor, sequence_ids: np.ndarray) -> None:
        num_sampled, choices = len(forward.sample_rows), self._chosen[rank]
        self.steps[rank].append(Ran(forward.positions.tolist(), sequence_ids.tolist(), num_sampled, choices))
        self._chosen[rank] = {}

    # --- bytes -------------------------------------------------------------------------------------------------------
    def bytes_of(self, rank: int) -> dict[str, int]:
        """Return what a rank read and wrote, by component, the exchange of experts included."""
        moved: Counter[str] = Counter(dict.fromkeys(COMPONENTS, 0))
        weights = self.group.workers[rank].decoder._weights
        for number, ran in enumerate(self.steps[rank]):
            own_rows = self._own_rows(rank, ran)
            if ran.positions:
                moved["attention"] += sum(nbytes(getattr(layer, n)) for layer in weights.layers for n in ATTENTION)
                moved["kv"] += self._kv_bytes(rank, ran)
            if own_rows:
                moved["dense"] += self._dense_bytes(rank) + own_rows * self._row_bytes(rank)
                moved["activations"] += 4 * len(weights.layers) * own_rows * self._row_bytes(rank)
                moved["shared"] += sum(
                    nbytes(layer.moe.shared, layer.moe.shared_gate) for layer in weights.layers if layer.moe is not None
                )
            if ran.num_sampled and rank % self.group.atp == 0:
                moved["dense"] += nbytes(weights.head, weights.head_bias)
            for layer, experts in self._hit(rank, number).items():
                slots = self.group.placement.local_experts(rank, layer).tolist()
                moved["routed"] += sum(self._slot_bytes(rank, layer, slots.index(expert)) for expert in experts)
        moved["exchange"] = sum(self.sent_by(rank)[1:])
        return dict(moved)

    def sent_by(self, rank: int) -> list[int]:
        """Return bytes sent by scope, one domain: a row goes once to a rank, an answer for every choice comes back."""
        sent, owner_of = [0] * len(SCOPES), self._owner_of()
        for number in range(len(self.steps[rank])):
            for source, ran in enumerate(own[number] for own in self.steps):
                for layer, tokens in ran.choices.items():
                    for experts in tokens:
                        owners = [owner_of[layer, expert] for expert in experts if expert >= 0]
                        if source == rank:
                            for owner in set(owners):
                                sent[owner != rank] += self._row_bytes(rank)
                        sent[source != rank] += owners.count(rank) * self._row_bytes(rank)
        return sent if len(self.steps) > 1 else [0] * len(SCOPES)

    def _owner_of(self) -> dict[tuple[int, int], int]:
        placement = self.group.placement
        return {
            (layer, expert): rank
            for layer in range(placement.num_layers)
            for rank in range(placement.num_ranks)
            for expert in placement.local_experts(rank, layer).tolist()
        }

    def _own_rows(self, rank: int, ran: Ran) -> int:
        """Rows between attentions: those of one rank, or its part where ranks divide heads."""
        atp, rows = self.group.atp, len(ran.positions)
        return rows // atp + (rank % atp < rows % atp)

    def _hit(self, rank: int, number: int) -> dict[int, set[int]]:
        """Experts of a rank that anybody's rows chose in a step, by MoE layer."""
        owner_of, hit = self._owner_of(), defaultdict(set)
        for own in self.steps:
            for layer, tokens in own[number].choices.items():
                hit[layer] |= {e for experts in tokens for e in experts if e >= 0 and owner_of[layer, e] == rank}
        return hit

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
    def flops_of(self, rank: int) -> dict[str, int]:
        """Return the operations of a rank's products, by component."""
        worker = self.group.workers[rank]
        config, own = worker.model_config, worker._own_config
        moe, width = config.moe, config.hidden_size
        flops: Counter[str] = Counter(dict.fromkeys(COMPONENTS, 0))
        owner_of = self._owner_of()
        for number, ran in enumerate(self.steps[rank]):
            rows = self._own_rows(rank, ran)
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
            for other in self.steps:
                for layer, tokens in other[number].choices.items():
                    for experts in tokens:
                        here = sum(owner_of[layer, e] == rank for e in experts if e >= 0)
                        flops["routed"] += here * 6 * width * moe.expert_width
        return dict(flops)

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


def counted_bytes(counters: RankCounters) -> dict[str, int]:
    """Return what a rank counted over all phases, by component."""
    return dict(zip(COMPONENTS, counters.bytes_moved.sum(0).tolist()))


def counted_flops(counters: RankCounters) -> dict[str, float]:
    """Return the operations that a rank counted over all phases, by component."""
    return dict(zip(COMPONENTS, counters.flops.sum(0).tolist()))
