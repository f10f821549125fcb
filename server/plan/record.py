"""A plan as plain data: what `--json` prints, and what the text of the command is made of.

Not the planning and not the text (view.py). Units in names; every rate says what it counts and over which GPUs.
"""

from __future__ import annotations

from typing import Any

from ...topologies.budget import ByteBudget
from ...topologies.expansion import expansion
from ...topologies.grid import placement_summary
from ...topologies.planner.flags import foreign_flags
from ...topologies.planner.hardware import Hardware
from ...topologies.planner.money import cost
from ...topologies.planner.pools import Planned, divisibility
from ...topologies.planner.serving import Served
from ...topologies.planner.step_time import StepTime
from .inputs import Asked


def plan_record(asked: Asked, pools: dict[str, Planned], served: Served) -> dict[str, Any]:
    """Return everything that a plan of named pools says."""
    return {
        **given_record(asked),
        "pools": {name: _pool(asked, planned) for name, planned in pools.items()},
        "decode_step": step_record(served.step),
        "served": served_record(asked, served),
    }


def given_record(asked: Asked) -> dict[str, Any]:
    """Return what was asked: model, machine and workload."""
    footprint, workload = asked.model.footprint, asked.workload
    pools = asked.layout.pools.values() if asked.layout is not None else ()
    links = dict.fromkeys(str(link) for topology in pools if (link := asked.link(topology)) is not None)
    return {
        "model": {
            "name": footprint.name,
            "facts_from": asked.checked,
            "weights_bytes": footprint.total_bytes,
            "parameters_in_matrices": asked.model.total_numbers,
            "active_parameters": asked.model.active_numbers,
            "kv_bytes_per_token": sum(group.bytes_per_token for group in footprint.kv_groups),
        },
        "hardware": hardware_record(asked.hardware),
        "measured_exchange": "; ".join(links) or None,
        "settings": asked.settings,
        "workload": {
            "isl": workload.isl,
            "osl": workload.osl,
            "concurrency": workload.concurrency,
            "prefix_hit_share": workload.hit,
            "drafts": workload.drafts,
            "draft_acceptance": workload.acceptance if workload.drafts else None,
        },
    }


def hardware_record(hardware: Hardware) -> dict[str, Any]:
    """Return the machine with the source of every figure."""
    return {
        "name": hardware.key,
        "title": hardware.name,
        "preliminary": hardware.preliminary,
        "figures": {
            figure: {"value": getattr(hardware, figure), "source": source} for figure, source in hardware.sources
        },
    }


def _pool(asked: Asked, planned: Planned) -> dict[str, Any]:
    topology, grid, num_experts = planned.budget.topology, planned.grid, asked.model.footprint.num_experts
    unit = "rank" if asked.hardware.is_shared else "GPU"
    return {
        "topology": topology.long(),
        "num_ranks": topology.num_ranks,
        "expansion": expansion(topology, num_experts=num_experts, unit=unit).splitlines(),
        "domains": grid.num_domains,
        "idle_places": grid.num_idle,
        "domain_map": str(grid).splitlines(),
        "expert_map": placement_summary(topology, num_experts).splitlines() if num_experts else [],
        "divisibility": divisibility(topology, asked.model),
        "warnings": topology.warnings(),
        "budget": budget_record(planned.budget),
        "flags": foreign_flags(topology, asked.model.footprint.name),
    }


def budget_record(budget: ByteBudget) -> dict[str, Any]:
    """Return the bytes of the fullest rank, line by line."""
    return {
        "lines": [{"name": line.name, "kind": line.kind, "bytes": line.num_bytes} for line in budget.lines],
        "total_bytes": budget.total,
        "rank_memory_bytes": budget.rank_memory_bytes,
        "kv_blocks": dict(zip([group.name for group in budget.kv_groups], budget.group_blocks, strict=True)),
        "block_tokens": budget.limits.block_size,
        "max_concurrency": budget.max_concurrency(budget.limits.max_model_len),
        "text": budget.table().splitlines(),
    }


def step_record(step: StepTime) -> dict[str, Any]:
    """Return a step part by part."""
    return {
        "seconds": step.seconds,
        "parts": [
            {
                "name": part.name,
                "bytes": part.num_bytes,
                "flops": part.flops,
                "seconds": part.seconds,
                "compute_seconds": part.computing,
                "binds": part.binds,
            }
            for part in step.parts
        ],
        "compute_seconds": step.computing,
        "hidden_seconds": step.hidden_seconds,
        "memory_saturation": step.saturation,
        "binds": step.binds,
    }


def served_record(asked: Asked, served: Served) -> dict[str, Any]:
    """Return what users get, and what it costs."""
    spent = cost(served, price=asked.price, watts=asked.watts)
    return {
        "ttft_seconds": served.ttft,
        "ttft_waiting_seconds": served.waiting,
        "tpot_seconds": served.tpot,
        "sequences_per_attention_replica": served.batch,
        "prompt_rows_beside": served.chunk,
        "requests_per_second": served.requests,
        "limit": served.limit,
        "rates": [
            rate(1 / served.tpot, "output tokens of one user", "user"),
            rate(served.output_rate / served.num_gpus, "output tokens", "all GPUs"),
            rate(served.output_rate / served.decode_gpus, "output tokens", "GPUs that decode"),
            rate(served.total_rate / served.num_gpus, "input and output tokens, prefix hits included", "all GPUs"),
        ],
        "num_gpus": served.num_gpus,
        "price_per_million_output_tokens": spent.per_million,
        "joules_per_output_token": spent.joules,
    }


def rate(value: float, numerator: str, denominator: str) -> dict[str, Any]:
    """Return a rate that says what it counts."""
    return {"tokens_per_second": value, "numerator": numerator, "denominator": denominator}
