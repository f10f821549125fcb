"""Times exchanges and MoE layers of one rank as a probe asks, together with all other ranks of the group.

Not what to ask and not what follows (topologies/link_probes.py). Rows and where they go are made up; nothing is kept.
Letters: T tokens, D width, K top-k, P slots of the group. Units: seconds of the host's clock, bytes, FLOP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..telemetry import StepMarks
from ..telemetry.step_marks import EXPERTS as EXPERTS_PART
from ..telemetry.step_marks import unpack_marks
from ..topologies.link_probes import EXCHANGE, EXPERTS, FAR, LAYERS, NEAR, LinkProbe, RankFound
from ..topologies.overlap_choice import HALVES
from .layer import MoELayer
from .wide_ep.exchanges import Exchange, StepwiseExchange
from .wide_ep.exchanges.traffic import BETWEEN_DOMAINS, IN_DOMAIN
from .wide_ep.placement import ExpertPlacement


class LinkProber:
    """Probes of one rank. `run` is a collective: every rank calls it with the same probe.

    Args:
        layers: the MoE layers of the model on this rank, at least one.
        exchange: that joins the ranks.
        placement: of experts.
        rank: this one.
        rows: [0, D], as steps have them.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        exchange: Exchange,
        placement: ExpertPlacement,
        rank: int,
        rows: torch.Tensor,
    ) -> None:
        self._layers, self._exchange = layers, exchange
        self._top_k, self._width, self._dtype, self._device = layers[0].top_k, rows.shape[1], rows.dtype, rows.device
        domains = torch.from_numpy(placement.rank_domain)[torch.from_numpy(placement.slot_rank).long()]  # [P]
        slots, own = torch.arange(placement.num_slots), domains == int(placement.rank_domain[rank])
        self._slots = {NEAR: slots[own], FAR: slots[~own]}
        self._all_slots = slots
        self._random = torch.Generator().manual_seed(rank)

    @torch.inference_mode()
    def run(self, probe: LinkProbe) -> RankFound:
        """Do what `probe` asks for."""
        x = torch.randn(probe.rows, self._width, generator=self._random).to(self._device, self._dtype)
        found = self._run_layers(probe, x) if probe.what == LAYERS else self._run_exchange(probe, x)
        self._exchange.take_traffic()  # no step has sent it
        return found

    def _run_exchange(self, probe: LinkProbe, x: torch.Tensor) -> RankFound:
        ids = self._ids(probe.rows, self._slots.get(probe.what, self._all_slots))
        weights = torch.rand(ids.shape, generator=self._random).to(self._device)
        self._begin(probe, probe.rows)
        seconds = []
        for _ in range(probe.repeats):
            begin = self._now()
            arrived = self._exchange.dispatch(x, ids)
            rows = self._exchange.output(arrived.num_rows)
            if rows is None:  # what a padded exchange brings is not all there is room for
                rows = x.new_zeros(arrived.num_rows, self._width) if arrived.is_padded else arrived.rows
            self._exchange.combine(rows, weights, arrived.handle)
            seconds.append(self._now() - begin)
        sent = self._exchange.take_traffic().num_bytes
        return RankFound(
            seconds={EXCHANGE: tuple(seconds)},
            near_bytes=sent[IN_DOMAIN] / probe.repeats,
            far_bytes=sent[BETWEEN_DOMAINS] / probe.repeats,
        )

    def _run_layers(self, probe: LinkProbe, x: torch.Tensor) -> RankFound:
        on_host = self._device.type == "cpu"  # elsewhere the host's marks say nothing about experts
        seconds: dict[str, list[float]] = {overlap: [] for overlap in probe.overlaps}
        seconds |= {EXPERTS: []} if on_host else {}
        num_bytes = flops = 0.0
        for turn in range(probe.repeats):
            layer = self._layers[turn % len(self._layers)]
            for overlap in probe.overlaps:
                marks = StepMarks() if on_host and overlap == probe.overlaps[0] else None
                self._begin(probe, -(-probe.rows // 2) if overlap == HALVES else probe.rows)
                begin = self._now()
                layer(x, overlap, marks)
                seconds[overlap].append(self._now() - begin)
                if marks is not None:
                    seconds[EXPERTS].append(_experts_seconds(marks))
                    num_bytes += int((layer.tokens_per_slot > 0).sum()) * layer.bytes_per_slot
                    flops += int(layer.tokens_per_slot.sum()) * layer.flops_per_row
        return RankFound(
            seconds={name: tuple(found) for name, found in seconds.items()},
            expert_bytes=num_bytes / probe.repeats,
            expert_flops=flops / probe.repeats,
        )

    def _begin(self, probe: LinkProbe, rows: int) -> None:
        if isinstance(self._exchange, StepwiseExchange):
            self._exchange.begin_step(probe.exchange, rows)

    def _ids(self, rows: int, slots: torch.Tensor) -> torch.Tensor:
        """Return [T, K] i32: different ones of `slots` for each row, as many as there are; -1 for the rest."""
        ids = torch.full((rows, self._top_k), -1, dtype=torch.int32)
        number = min(self._top_k, len(slots))
        if number:
            chosen = torch.rand(rows, len(slots), generator=self._random).argsort(1)[:, :number]
            ids[:, :number] = slots[chosen].to(torch.int32)
        return ids.to(self._device)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _experts_seconds(marks: StepMarks) -> float:
    """Return the time of experts among the parts of a layer."""
    read = unpack_marks(marks.packed())
    ends = read.ends.tolist()
    begins = [read.began, *ends[:-1]]
    spans = zip(begins, ends, read.parts.tolist(), strict=True)
    return 1e-9 * float(sum(end - begin for begin, end, part in spans if part == EXPERTS_PART))
