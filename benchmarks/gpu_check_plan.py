"""What gpu_check runs, in which order, within which time, and what of it is there already; goals and the table.

Nothing here knows torch or a GPU. Units: seconds; shares of 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What figures of a stage depend on: kernels, what launches them, and its own part of this script.
_KERNELS = ("*/kernels/*.py", "*/*/kernels/*.py", "native/gpu/*.py", "quant/*.py", "benchmarks/gpu_check_inputs.py")
_RUNTIME = ("runtime/**/*.py", "models/*.py", "moe/*.py", "moe/**/*.py", "attention/*.py")
_TIMES = "benchmarks/gpu_check_device.py"
SOURCES = {
    "values": (*_KERNELS, "benchmarks/gpu_check_values*.py", "tests/support/numerics.py"),
    "speed": (*_KERNELS, _TIMES, *(f"benchmarks/gpu_check_{name}.py" for name in ("speed", "rows", "linear"))),
    "steps": (*_KERNELS, _TIMES, *_RUNTIME, "benchmarks/gpu_check_steps.py"),
}


def source_hash(patterns: Sequence[str], root: Path = ROOT) -> str:
    """Return a hash of the files that match, names included."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


ENDED = "ended"  # of an item that ended the process
_TRACE = 2000  # characters of what is recorded of a failure


class LeftOut(Exception):
    """An item cannot run on this machine; the text says why."""


class Unsound(Exception):
    """An item failed so that nothing after it can run in this process; it is in the record."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to find out.

    Attributes:
        name: of its own in the stage.
        rank: importance; lower ones run first.
        run: does it; returns figures that JSON can hold.
        floor_s: what it takes at least, for the first guess.
        most_s: after so long whoever watches the process takes it for one that never ends.
        kind: asked before it runs: items of a kind take about as long as each other.
        group: where one of a group ended the process, the others of it are left out.
    """

    name: str
    rank: int
    run: Callable[[], dict[str, Any]]
    floor_s: float = 1.0
    most_s: float = 60.0
    kind: Callable[[], str] = lambda: ""
    group: str | None = None


@dataclass
class Record:
    """The JSON of a stage: written after every item, so that whatever ends the script loses one item at most.

    Attributes:
        path: of the file.
        key: what results depend on (source hash, card, versions); those of another key are not taken over.
        results: by name of the item.
        left_out: names, with why; while a stage runs, all that it has not come to yet.
        seconds: that the last run took, from the start of its process.
        finished: nothing is left to do but what failed or had no time.
    """

    path: Path
    key: dict[str, str]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    finished: bool = False

    @classmethod
    def open(cls, path: Path, key: dict[str, str], *, keep_errors: bool = False) -> Record:
        """Return what is there of the same key, or an empty record. What failed is tried again, or kept."""
        found = cls.read(path)
        if found is None or found.key != key:
            return cls(path, key)
        found.results = {name: one for name, one in found.results.items() if keep_errors or "error" not in one}
        found.left_out = {}
        return found

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Return what is there, of whatever key; None where nothing or something else is."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        try:
            parts = (dict(found[name]) for name in ("key", "results", "left_out"))
            return cls(path, *parts, float(found["seconds"]), bool(found["finished"]))
        except (TypeError, KeyError, ValueError):
            return None

    def write(self) -> None:
        """Replace the file at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        text = json.dumps(
            {
                "key": self.key, "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "finished": self.finished, "seconds": round(self.seconds, 2),
                "results": self.results, "left_out": self.left_out,
            },
            indent=1,
        )  # fmt: skip
        part.write_text(text + "\n")
        os.replace(part, self.path)


class Budget:
    """The time of a stage. An item is begun where the slowest of the last ones of its kind would still fit.

    Args:
        seconds: in all.
        clock: monotonic.
        start: when it began; None: now.
    """

    _LOOKED_AT = 5  # items behind, of which the slowest is expected again

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic, *, start: float | None = None
    ) -> None:
        self._clock, self._start, self._seconds = clock, clock() if start is None else start, seconds
        self._last: dict[str, list[float]] = {}

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left; below 0 once it is over."""
        return self._seconds - self.used

    def allows(self, floor_s: float, kind: str = "") -> bool:
        """Return whether an item that takes `floor_s` at least may begin."""
        return max([floor_s, *self._last.get(kind, [])[-self._LOOKED_AT :]]) <= self.left

    def note(self, seconds: float, kind: str = "") -> None:
        """Tell how long an item took."""
        self._last.setdefault(kind, []).append(seconds)


def run_items(
    items: Iterable[Item],
    record: Record,
    budget: Budget,
    told: Callable[[str, dict[str, Any]], None],
    *,
    is_sound: Callable[[], bool] = lambda: True,
) -> None:
    """Run what is not in the record yet, the most important first; what there is no time for is left out, by name.

    An item that fails is recorded with its error and does not stop others; the next run tries it again. Which one is
    under way, and until when at most, stands in a file beside the record (`running_file`).

    Args:
        items: what there is.
        record: of the stage.
        budget: its time.
        told: gets name and figures of each that ran.
        is_sound: asked when something failed: whether this process can run others.

    Raises:
        Unsound: it cannot.
    """
    ordered = sorted(items, key=lambda item: item.rank)
    left = [item for item in ordered if item.name not in record.results]
    broken = {item.group: item.name for item in ordered if ENDED in record.results.get(item.name, {})}
    record.left_out = {item.name: "not come to" for item in left}
    record.write()
    for item in left:
        if item.group is not None and item.group in broken:
            record.left_out[item.name] = f"see {broken[item.group]}"
            continue
        kind = item.kind()
        if not budget.allows(item.floor_s, kind):
            record.left_out[item.name] = f"no time: {max(budget.left, 0):.0f} s left"
            continue
        began = budget.used
        running_file(record.path).write_text(json.dumps([item.name, time.monotonic() + item.most_s]))
        try:
            figures = item.run()
        except LeftOut as why:
            record.left_out[item.name] = str(why)
            continue
        except Exception as error:  # whatever it is: others go on
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:500]}
            if not isinstance(error, AssertionError):  # that says what is wrong with a value
                figures["trace"] = traceback.format_exc()[-_TRACE:]
        budget.note(budget.used - began, kind)
        record.results[item.name] = {**figures, "took_s": round(budget.used - began, 2)}
        del record.left_out[item.name]
        record.seconds = budget.used
        record.write()
        told(item.name, figures)
        if ("error" in figures or "torch_error" in figures) and not is_sound():
            raise Unsound(item.name)
    running_file(record.path).unlink(missing_ok=True)
    record.finished = not record.left_out and not any("error" in one for one in record.results.values())
    record.seconds = budget.used
    record.write()


def running_file(record: Path) -> Path:
    """Return where the name of the item under way stands, and the time of the monotonic clock to wait for it until."""
    return record.with_suffix(".running")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a figure shall be.

    Attributes:
        figure: its key in the results of an item.
        bound: the least share, or the largest factor with `at_most`.
    """

    figure: str
    bound: float
    at_most: bool = False

    def judged(self, figures: Mapping[str, Any]) -> str:
        """Return `met` or `missed` with the goal; where the figure is not there, that it is not known."""
        sign = "<=" if self.at_most else ">="
        wanted = f"{sign} {self.bound:.2f}x" if self.at_most else f"{sign} {self.bound:.0%}"
        value = figures.get(self.figure)
        if value is None:
            return f"goal {wanted}: not measured"
        met = value <= self.bound if self.at_most else value >= self.bound
        return f"goal {wanted}: {'met' if met else 'missed'}"


# By the name that an item's figures give as `goal`; for an H200, which copies 4.3 TB/s and multiplies 790 TFLOP/s.
GOALS = {
    "decode experts": Goal(figure="bandwidth_share", bound=0.80),
    "prefill experts": Goal(figure="rate_share", bound=0.65),
    "decode attention": Goal(figure="bandwidth_share", bound=0.80),
    "prefill attention": Goal(figure="rate_share", bound=0.55),
    "decode step": Goal(figure="times_floor", bound=1.6, at_most=True),
}
_FEWEST_EXPERTS, _MOST_DECODE_TOKENS = 8, 256
_GOAL_SEQUENCES, _GOAL_CONTEXT = 32, 8192


def experts_goal(tokens: int, hit: float, *, bound_by_memory: bool) -> str | None:
    """Return the name of the goal of grouped products of `tokens` that hit so many experts; None: there is none."""
    if not bound_by_memory:
        return "prefill experts"
    return "decode experts" if hit >= _FEWEST_EXPERTS and tokens <= _MOST_DECODE_TOKENS else None


def decode_attention_goal(sequences: int, context: int) -> str | None:
    """Return the name of the goal of decode attention, which is about one size."""
    return "decode attention" if (sequences, context) == (_GOAL_SEQUENCES, _GOAL_CONTEXT) else None


def goal_of(figures: Mapping[str, Any]) -> Goal | None:
    """Return the goal that an item's figures name."""
    return GOALS.get(figures.get("goal") or "")


def share_figures(work_bytes: float, flops: float, seconds: float, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Return time, shares of both measured ceilings and how many times the floor of both it took."""
    floor = max(work_bytes / ceilings["copy_bytes_per_second"], flops / ceilings["matrix_flops_per_second"])
    return {
        "us": seconds * 1e6,
        "bandwidth_share": work_bytes / seconds / ceilings["copy_bytes_per_second"],
        "rate_share": flops / seconds / ceilings["matrix_flops_per_second"],
        "times_floor": seconds / floor,
    }


# Key of the results, heading, format.
_COLUMNS = (
    ("us", "us", "{:.1f}"),
    ("bandwidth_share", "of copy", "{:.0%}"),
    ("rate_share", "of matrix", "{:.0%}"),
    ("times_floor", "x floor", "{:.2f}"),
    ("torch_us", "torch us", "{:.1f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("invariant_us", "invariant us", "{:.1f}"),
    ("max_error", "max error", "{:.1e}"),
    ("rms_error", "rms error", "{:.1e}"),
    ("error", "error", "{}"),
)


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the results as lines of ASCII: the columns that some item has, and goals behind them."""
    used = [column for column in _COLUMNS if any(column[0] in figures for figures in results.values())]
    rows = [["", *(heading for _, heading, _ in used), ""]]
    for name, figures in results.items():
        goal = goal_of(figures)
        cells = [form.format(figures[key]) if figures.get(key) is not None else "" for key, _, form in used]
        told = goal.judged(figures) if goal else str(figures.get("said", ""))
        rows.append([name, *cells, told])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column in (0, len(widths) - 1) else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]  # fmt: skip


def verdicts(records: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return how many figures met each goal, by name; `not measured` where none was."""
    counts = {name: [0, 0] for name in GOALS}
    for results in records:
        for figures in results.values():
            goal = goal_of(figures)
            if goal is not None and figures.get(goal.figure) is not None:
                counts[figures["goal"]][0] += goal.judged(figures).endswith(": met")
                counts[figures["goal"]][1] += 1
    return [
        f"{name}: {f'{met} of {number} met' if number else 'not measured'}" for name, (met, number) in counts.items()
    ]


def invariance_costs(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what batch invariance costs: a line for each size of which both forms were measured.

    Of kernels the invariant form stands beside the other (`invariant_us`); of products that are torch's otherwise torch
    stands beside the invariant form (`batch-invariant` in the name); of steps it is an item of its own, whose name has
    `batch-invariant` where the other has `graphs`. Attention has one form.
    """
    lines = []
    for name, figures in results.items():
        if "graphs" in name:
            usual, fixed = figures.get("us"), results.get(name.replace("graphs", "batch-invariant"), {}).get("us")
        elif "batch-invariant" in name:
            usual, fixed = figures.get("torch_us"), figures.get("us")
        else:
            usual, fixed = figures.get("us"), figures.get("invariant_us")
        if usual and fixed:
            lines.append(f"batch invariance, {name}: {fixed / usual - 1:+.0%} time ({usual:.1f} -> {fixed:.1f} us)")
    if any(" attention " in name and "us" in figures for name, figures in results.items()):
        lines.append("batch invariance, attention: +0% time, its splits and tiles are fixed in any case")
    return lines
