"""The contract by which token rows travel to the ranks of their experts and back.

Not an implementation: local.py, threads.py, shm.py, all_to_all.py, hierarchical.py and padded.py are. The last three
send rows over links and come in stages (stages.py), between which others can work. Nothing here knows how
`topk_weights` were made, nor what an expert computes.
Letters: T tokens of this rank, D width, K top-k, M rows received, R rows that lie in `source`, P_local expert slots of
this rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from .stages import Stages
from .traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What arrived on this rank.

    Attributes:
        source: [R, D] where the rows lie; one that several experts here want lies there once.
        row_tokens: [M] i32, which row of `source` each sorted one is; None: `source` holds just them, in order.
        tokens_per_slot: [P_local] i64 on the CPU, sums to M; with `is_padded` on the device of the rows, to M at most.
        handle: what `combine` needs to bring rows home; opaque.
        is_padded: rows after the last slot's stand for nothing, and nobody reads what comes of them.
        expected_rows: with `is_padded`, how many stand for something where ranks are chosen alike; None: all.
    """

    source: torch.Tensor
    row_tokens: torch.Tensor | None = None
    tokens_per_slot: torch.Tensor
    handle: Any
    is_padded: bool = False
    expected_rows: int | None = None

    @cached_property
    def rows(self) -> torch.Tensor:
        """[M, D] rows sorted by local slot; within a slot by source rank, then token, then k."""
        return self.source if self.row_tokens is None else self.source.index_select(0, self.row_tokens)

    @property
    def num_rows(self) -> int:
        """M."""
        return len(self.source if self.row_tokens is None else self.row_tokens)


class Exchange(Protocol):
    """Moves rows between the ranks of one expert-parallel group.

    Both methods are collectives: every rank calls each once per MoE layer per step, with T = 0 too.
    """

    @property
    def name(self) -> str:
        """How a plan calls it."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """What this rank holds for rows under way: its part of shared memory; over links, of the largest collective."""
        ...

    def dispatch(self, x: torch.Tensor, physical_ids: torch.Tensor) -> Dispatched:
        """Send each row to the slots of its experts.

        Args:
            x: [T, D].
            physical_ids: [T, K] i32, global slot numbers (rank r owns the contiguous range given by the placement);
                -1 sends nothing.
        """
        ...

    def output(self, num_rows: int) -> torch.Tensor | None:
        """Return [M, D] where expert outputs can be written so that `combine` need not copy them; None: anywhere."""
        ...

    def combine(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> torch.Tensor:
        """Bring expert outputs home and add them with their weights.

        Args:
            rows: [M, D] expert outputs in the order of `Dispatched.rows`, in the activation dtype, unweighted.
            topk_weights: [T, K] f32; entries of dropped ids are ignored.
            handle: from the dispatch of the same layer.

        Returns:
            [T, D] in the dtype of `rows`: sum over ascending k in fp32, rounded once (`hierarchical` rounds the sum of
            each domain, too).
        """
        ...

    def take_traffic(self) -> Traffic:
        """Return what this rank has moved since the last call."""
        ...


@runtime_checkable
class StagedExchange(Exchange, Protocol):
    """An exchange over links: what it does can also be taken stage by stage, with the same bits.

    A dispatch and its combine may have those of other rows between their stages, if all ranks take turns alike.
    """

    def dispatching(
        self, x: torch.Tensor, physical_ids: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> Stages[Dispatched]:
        """Take the stages of `dispatch`, the last of which is behind ROWS.

        Args:
            x, physical_ids: see there.
            topk_weights: [T, K] f32, what `combining` will get: they travel with the rows where somebody else needs
                them. All ranks give them, or none does.
        """
        ...

    def combining(self, rows: torch.Tensor, topk_weights: torch.Tensor, handle: Any) -> Stages[torch.Tensor]:
        """Take the stages of `combine`, the last of which is behind ANSWERS."""
        ...

    def repeat(self, traffic: Traffic) -> None:
        """Book once more what the captured calls of a CUDA graph have moved, because it was replayed."""
        ...

    def rehearsing(self) -> AbstractContextManager[None]:
        """Return what lets calls begin no collective: rows come back as if all ranks had sent those of this one.

        For what is compiled when it is first called. It takes links that can rehearse (`rehearsed_link.py`).
        """
        ...
