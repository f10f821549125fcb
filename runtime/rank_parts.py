"""What a rank is made of: the worker, its share of the experts, and what joins it to the other ranks of its group.

Not its life (worker_main.py) and not the collectives. torch is imported when something is made, not before.
Units: seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..telemetry import RankProgress
from .config import EngineConfig
from .process_groups import join_groups
from .processes.launch import WorkerStart, exchange_path

if TYPE_CHECKING:
    from ..moe.wide_ep.exchanges import Exchange, GroupShape
    from ..moe.wide_ep.exchanges.joining import LinkOf
    from ..moe.wide_ep.exchanges.threads import ThreadHub
    from ..moe.wide_ep.placement import ExpertPlacement
    from .graphs.starting import OnProgress
    from .worker_main import RankWorker

# While ranks start, collectives wait for the slowest one to load and to capture; the supervisor ends a group that is
# stuck long before. Once all of them are warm they get less (start_up.py).
START_TIMEOUT_S = 3600.0


def build_worker(
    start: WorkerStart, progress: RankProgress, on_loading: OnProgress, hub: ThreadHub | None
) -> RankWorker:
    """Return the real worker: its share of the experts, and the exchange that its group uses."""
    import torch

    from .attention_ranks import join_attention
    from .worker import Worker

    config = start.config
    if config.parallel.threads is not None:
        torch.set_num_threads(config.parallel.threads)
    if config.parallel.device.startswith("cuda"):
        from .ranks.own_gpu import take_gpu

        take_gpu(start.device_index)
    placement = _placement(config)
    return Worker(
        config,
        rank=start.rank,
        num_ranks=start.num_ranks,
        exchange=_join_exchange(start, placement, progress, hub),
        placement=placement,
        progress=progress,
        on_loading=on_loading,
        ranks=join_attention(start, progress, hub, timeout_s=START_TIMEOUT_S),
    )


def build_hub(config: EngineConfig, num_ranks: int) -> ThreadHub:
    """Return the meeting place of ranks that are threads."""
    from ..topologies import parse_topology
    from .attention_ranks import GroupHub

    shape = group_shape(config, _placement(config))
    return GroupHub(shape, parse_topology(config.parallel.topology))


def group_shape(config: EngineConfig, placement: ExpertPlacement) -> GroupShape:
    """Return who owns which slots in a group, in which domain, and how slow the link between domains is made."""
    from ..moe.wide_ep.exchanges import GroupShape, SlowRate
    from ..topologies import parse_topology

    topology = parse_topology(config.parallel.topology)
    is_slow = topology.rate or topology.delay
    return GroupShape(
        slot_ranges=placement.slot_ranges,
        domain_sizes=topology.domains,
        slow=SlowRate(megabytes_per_second=topology.rate, delay_us=topology.delay) if is_slow else None,
    )


def _placement(config: EngineConfig) -> ExpertPlacement:
    from ..models.families import load_config
    from .placements import expert_placement

    return expert_placement(config, load_config(Path(config.model.path)))


def _join_exchange(
    start: WorkerStart, placement: ExpertPlacement, progress: RankProgress, hub: ThreadHub | None
) -> Exchange:
    if start.num_ranks == 1:
        from ..moe.wide_ep.exchanges.local import LocalExchange

        return LocalExchange(placement.num_slots)
    if hub is not None and start.exchanges == ("threads",):
        return hub.rank(start.rank)
    if start.exchanges == ("shm",):
        return _join_memory(start, placement, progress)
    from ..moe.wide_ep.exchanges import join_all_over_links

    shape, rank = group_shape(start.config, placement), start.rank
    link_of = _process_links(start, shape) if hub is None else lambda ranks: hub.link(ranks, rank)
    payload = start.config.parallel.exchange_payload
    return join_all_over_links(start.exchanges, shape, rank, link_of, payload=payload, progress=progress)


def _process_links(start: WorkerStart, shape: GroupShape) -> LinkOf:
    """Join the ranks of the group, which are processes, and return the links between any that exchanges need."""
    from ..moe.wide_ep.exchanges import link_members
    from ..moe.wide_ep.exchanges.process_links import process_links

    members = [ranks for name in start.exchanges for ranks in link_members(name, shape)]
    return process_links(join_groups(start, members, START_TIMEOUT_S), start.exchanges, start.config.parallel.device)


def _join_memory(start: WorkerStart, placement: ExpertPlacement, progress: RankProgress) -> Exchange:
    from ..models.families import load_config
    from ..moe.wide_ep.exchanges.shm import ShmExchange, ShmShape, meet_at
    from ..quant import parse_format

    config = start.config
    model = load_config(Path(config.model.path))
    shape = ShmShape(
        slot_ranges=placement.slot_ranges,
        capacity=config.schedule.max_num_batched_tokens,
        top_k=model.moe.routing.top_k if model.moe is not None else 1,
        width=model.hidden_size,
        dtype=parse_format(config.model.dtype_for(model.dtype)).torch_dtype,
    )
    fd = meet_at(exchange_path(Path(start.run_directory)), shape, start.rank, START_TIMEOUT_S)
    return ShmExchange(fd, shape, start.rank, has_cores=start.has_cores, progress=progress)
