"""What a search found, as plain data and as text.

Not the search (topologies/planner/search.py). Units in names; rates say what they count.
"""

from __future__ import annotations

from typing import Any

from ...topologies.planner.money import cost
from ...topologies.planner.search import Point, Searched
from .inputs import Asked
from .record import given_record, rate

GPU_RATE = "output tokens", "all GPUs that there are"


def search_record(asked: Asked, searched: Searched, most: int) -> dict[str, Any]:
    """Return the `most` best layouts and the Pareto front."""
    given = given_record(asked)
    del given["workload"]["concurrency"]
    return {
        **given,
        "num_gpus": asked.num_gpus,
        "targets": {"ttft_seconds": asked.targets.ttft, "tpot_seconds": asked.targets.tpot},
        "layouts_worked_out": searched.num_layouts,
        "points_worked_out": searched.num_points,
        "layouts_refused": searched.refused,
        "last_refusal": searched.why,
        "layouts_within_targets": len(searched.best),
        "best": [_point(asked, point) for point in searched.best[:most]],
        "front": [_point(asked, point) for point in searched.front],
    }


def _point(asked: Asked, point: Point) -> dict[str, Any]:
    served = point.served
    spent = cost(served, price=asked.price, watts=asked.watts)
    return {
        "layout": point.layout,
        "weights": point.weights,
        "concurrency": served.workload.concurrency,
        "sequences_per_attention_replica": served.batch,
        "ttft_seconds": served.ttft,
        "tpot_seconds": served.tpot,
        "rates": [
            rate(served.user_rate, "output tokens of one user", "user"),
            rate(point.gpu_rate, *GPU_RATE),
            rate(served.output_rate / served.decode_gpus, "output tokens", "GPUs that decode"),
        ],
        "step_memory_saturation": served.step.saturation,
        "binds": point.binds,
        "gpus_used": served.num_gpus,
        "price_per_million_output_tokens": spent.per_million,
        "joules_per_output_token": spent.joules,
    }


def search_text(found: dict[str, Any]) -> str:
    """Return what was found for people."""
    targets, workload = found["targets"], found["workload"]
    wanted = [f"{name.split('_')[0].upper()} <= {value * 1e3:g} ms" for name, value in targets.items() if value]
    lines = [
        f"{found['model']['name']} on {found['num_gpus']} GPUs of {found['hardware']['name']}"
        + ", PRELIMINARY figures" * found["hardware"]["preliminary"],
        f"{workload['isl']:,} tokens in, {workload['osl']:,} out; {' and '.join(wanted) or 'no targets'}",
        f"{found['layouts_worked_out']:,} pools and {found['points_worked_out']:,} points worked out, "
        f"{found['layouts_refused']:,} pools do not fit or cannot be",
        "",
    ]
    if not found["best"]:
        return "\n".join([*lines, "no layout is within the targets at any load; raise them, or use more GPUs\n"])
    shown = f"the best {len(found['best'])} of {found['layouts_within_targets']:,} layouts, each at its best load"
    lines += [shown, *_table(found["best"]), ""]
    lines += ["Pareto front: nobody is faster for a user and for a GPU", *_table(found["front"])]
    return "\n".join(lines) + "\n"


def _table(points: list[dict[str, Any]]) -> list[str]:
    priced = points[0]["price_per_million_output_tokens"] is not None
    head = "  tokens/s/GPU tokens/s/user   TTFT ms TPOT ms  requests    bound by  "
    lines = [head + ("     a million  " if priced else "") + "layout"]
    for point in points:
        user, gpu = (entry["tokens_per_second"] for entry in point["rates"][:2])
        line = (
            f"  {gpu:>12,.0f} {user:>13,.1f} {point['ttft_seconds'] * 1e3:>9,.0f} {point['tpot_seconds'] * 1e3:>7,.1f} "
            f"{point['concurrency']:>9,} {point['binds']:>11}  "
        )
        if priced:
            line += f"{point['price_per_million_output_tokens']:>14,.3f}  "
        lines.append(f"{line}{_short(point['layout'])} {point['weights']}")
    note = "output tokens over all GPUs that there are; output tokens of one user"
    lines.append(f"  ({note}{'; money of GPUs that the layout uses' * priced})")
    return lines


def _short(layout: str) -> str:
    """Return a layout without what says nothing: attention that is data parallel, no spare slots."""
    words = []
    for word in layout.split(" "):
        name, _, fields = word.partition("[")
        kept = [
            f for f in fields.rstrip("]").split(",") if f and not f.startswith("adp=") and f not in ("atp=1", "red=0")
        ]
        words.append(name + (f"[{','.join(kept)}]" if kept else ""))
    return " ".join(words)
