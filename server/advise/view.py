"""Advice as text: a sentence, and a table of layouts. Texts of a server or a file are shown as plain text.

Not the advice (topologies/advisor/). Units: as each column says.
"""

from __future__ import annotations

import unicodedata

from ...text.one_line import one_line
from ...topologies import TopologyError, format_bytes, parse_topology
from ...topologies.advisor.records import CHANGE, Advice, Candidate

_COLUMNS = ("layout", "tokens/s", "step", "exchange", "between", "routed", "change", "loads", "holds")


def headline(advice: Advice) -> str:
    """Return the verdict and why, in a line."""
    to = f" to {short_name(advice.advised)}" if advice.verdict == CHANGE else ""
    return plain(f"{short_name(advice.topology)}: {advice.verdict}{to}: {advice.reason}")


def table(advice: Advice) -> str:
    """Return the candidates, best first, that which runs marked; then those that are out, and the model's error."""
    rows = [_COLUMNS, *(_row(one) for one in advice.candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = [" ", *("*" if one.topology == advice.topology else " " for one in advice.candidates)]
    lines = [
        f"{mark} {row[0]:{widths[0]}}  {'  '.join(f'{cell:>{w}}' for cell, w in zip(row[1:], widths[1:], strict=True))}"
        for mark, row in zip(marks, rows, strict=True)
    ]
    lines = lines if advice.candidates else []
    lines += [plain(f"  {short_name(topology)} is out: {why}") for topology, why in advice.excluded]
    if not all(one.is_measured for one in advice.candidates):
        lines.append("  ?: over a link that nobody measured")
    if (found := advice.calibration) is not None:
        lines.append(
            f"  a step took {1e3 * found.observed_s:.2f} ms; figures of the start alone predict "
            f"{1e3 * found.predicted_s:.2f} ms ({found.error:+.0%}); exchanges take {found.exchange:.2f} times theirs, "
            f"{1e3 * found.rest_s:.2f} ms are explained by nothing"
        )
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return a text in one line, without characters that steer a terminal."""
    return "".join("?" if unicodedata.category(char) == "Cc" else char for char in one_line(text))


def short_name(topology: str) -> str:
    """Return `EPxDPy` of a long form."""
    try:
        return parse_topology(topology).short()
    except TopologyError:
        return plain(topology)[:40]


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        short_name(one.topology),
        f"{1 + one.gain:.2f}x",
        f"{1e3 * one.step_s:.2f} ms",
        f"{one.exchange_share:.0%}" + ("" if one.is_measured else "?"),
        f"{one.between_share:.0%}",
        f"{one.routed_ratio:.2f}x",
        plain(f"{one.change_s:.0f} s {one.way}") if one.way else "",
        format_bytes(one.load_bytes),
        f"{one.sequences}",
    )
