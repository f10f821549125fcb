"""The Pareto front of a search as a picture.

Not the search. matplotlib is an optional extra and imported here only. Units: output tokens/s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {
    "memory": "tab:blue", "compute": "tab:orange", "link": "tab:green", "launch": "tab:red", "imbalance": "tab:purple",
    "prefill": "tab:brown",
}  # fmt: skip


def draw_front(found: dict[str, Any], path: Path) -> None:
    """Write a picture of the front, coloured by what binds.

    Args:
        found: of `search_record`.
        path: its ending says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(
        title=f"{found['model']['name']} on {found['num_gpus']} GPUs of {found['hardware']['name']}, "
        f"{found['workload']['isl']} in, {found['workload']['osl']} out (planned, not measured)",
        xlabel="output tokens/s of one user",
        ylabel="output tokens/s / all GPUs that there are",
    )
    rates = [[entry["tokens_per_second"] for entry in point["rates"][:2]] for point in found["front"]]
    axes.plot([user for user, _ in rates], [gpu for _, gpu in rates], color="lightgrey", zorder=1)
    for binds, colour in _COLOURS.items():
        chosen = [pair for pair, point in zip(rates, found["front"], strict=True) if point["binds"] == binds]
        if chosen:
            axes.scatter([user for user, _ in chosen], [gpu for _, gpu in chosen], color=colour, label=binds, zorder=2)
    axes.set_ylim(bottom=0)
    if rates:
        axes.legend(title="bound by")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {str(path)!r}: {error}") from None
