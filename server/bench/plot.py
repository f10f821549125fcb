"""Histograms of the latencies of a run as a picture.

Not the figures (server/bench/statistics.py). matplotlib is an optional extra and imported here only.
Units: ms.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .statistics import LATENCIES, summary

EXTRA = "pip install 'moewe[bench]'"
BINS = 60
_LINES = {"median": "tab:green", "p95": "tab:orange", "p99": "tab:red"}


def require(package: str, what: str) -> None:
    """Refuse, before anything runs, what needs a package of the extra that is not installed.

    Raises:
        ValueError: names the extra.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs {package}, which is not installed; {EXTRA} brings it")


def plot(latencies: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Write a picture with a histogram of each latency that was measured.

    Args:
        latencies: seconds, by name of LATENCIES.
        title: stands above.
        path: its ending says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axes, (name, what) in zip(figure.subplots(2, 2).flat, LATENCIES.items(), strict=True):
        values = 1000 * np.asarray(latencies.get(name, ()), dtype=np.float64)
        axes.set(title=f"{what} ({values.size})", xlabel="ms", ylabel="count")
        if not values.size:
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
            continue
        axes.hist(values, bins=min(BINS, max(5, values.size)), color="tab:blue")
        points = summary(values.tolist())
        for point, colour in _LINES.items():
            axes.axvline(points[point], color=colour, linewidth=1, label=f"{point} {points[point]:.1f}")
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ValueError(f"--plot {str(path)!r}: {error}") from None


def check_format(path: Path) -> None:
    """Refuse a file ending that no picture can have.

    Raises:
        ValueError: names the endings.
    """
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {str(path)!r} has no ending that says its format; use .png, .svg or .pdf")
