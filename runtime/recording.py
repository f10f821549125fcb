"""Runs prompts through a model on one rank of this process and keeps what its routers chose.

Not a server and not a judgement of placements (moe.wide_ep.balancing.replay). Layers run one by one meanwhile, with the
same tokens as ever. Units: tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..models.families import load_config
from ..moe.wide_ep.traces import RoutingTrace
from .config import EngineConfig
from .launcher import OnLoading
from .params import SamplingParams
from .processes.group import GroupParts
from .rank_parts import build_worker
from .ranks.routing_log import RoutingLog
from .session import Session

if TYPE_CHECKING:
    from ..moe.wide_ep.exchanges.threads import ThreadHub
    from ..telemetry import RankProgress
    from .graphs.starting import OnProgress
    from .processes.launch import WorkerStart
    from .worker_main import RankWorker

log = logging.getLogger(__name__)


def record_routing(
    config: EngineConfig,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    most_tokens: int,
    on_loading: OnLoading | None = None,
) -> RoutingTrace:
    """Return what the routers chose while the model answered.

    Args:
        config: with the model's folder; its topology is not used.
        prompts: texts, or token ids.
        params: of every prompt.
        most_tokens: kept of prompts, and of answers.
        on_loading: told as weights load.

    Raises:
        ValueError: the model has no experts, or something cannot run as asked.
    """
    model = load_config(Path(config.model.path))
    if model.moe is None:
        raise ValueError(f"model {config.model.model!r} is dense: it has no routing to record")
    routing = model.moe.routing
    routing_log = RoutingLog(
        len(model.moe_layers), routing.num_experts, num_groups=max(1, routing.num_groups), most_tokens=most_tokens
    )

    def make_worker(
        start: WorkerStart, progress: RankProgress, on_loading: OnProgress, hub: ThreadHub | None
    ) -> RankWorker:
        worker = build_worker(start, progress, on_loading, hub)
        worker.routing_log = routing_log  # type: ignore[attr-defined]
        return worker

    parallel = msgspec.structs.replace(config.parallel, topology="EP1DP1", ranks="threads", eplb="off")
    config = msgspec.structs.replace(config, parallel=parallel)
    with Session.start(config, on_loading=on_loading, parts=GroupParts(make_worker=make_worker)) as session:
        ids = [session.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        for _, delta in session.stream(ids, [params] * len(ids)):
            if delta.finish_reason == "error":
                log.warning("a prompt ended early: %s", delta.error)
    if routing_log.dropped:
        log.warning("%d tokens beyond the first %d of their phase were not kept", routing_log.dropped, most_tokens)
    return routing_log.trace()
