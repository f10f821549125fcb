"""A run as a table for people, as JSON for programs and as a picture; and the exit code that sums it up.

Not the figures (server/bench/statistics.py). Nothing secret is written: of headers only names, no API key.
Units: as the key names and the table's own words say.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..terminal.stdout import put
from .plot import plot
from .records import RequestRecord
from .statistics import LATENCIES, POINTS, latencies

SCHEMA = 1
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_ROWS = (
    ("completed", "requests completed", "d"),
    ("failed", "requests failed", "d"),
    ("duration", "duration, s", ".2f"),
    ("total_input_tokens", "input tokens", "d"),
    ("total_output_tokens", "output tokens", "d"),
    ("request_throughput", "requests/s", ".2f"),
    ("request_goodput", "requests/s within targets", ".2f"),
    ("output_throughput", "output tokens/s", ".1f"),
    ("total_token_throughput", "total tokens/s", ".1f"),
    ("batches", "batches", "d"),
    ("median_batch_ms", "median batch, ms", ".2f"),
    ("max_concurrent_requests", "most requests at once", "d"),
    ("tokens_per_piece", "tokens a piece of a stream", ".2f"),
    ("preemptions", "preemptions", ".0f"),
    ("peak_kv_usage", "peak KV use", ".1%"),
    ("weight_bytes", "weights", "bytes"),
    ("peak_memory_bytes", "peak memory, all processes", "bytes"),
)


def record(
    tool: str, settings: Mapping[str, Any], server: Mapping[str, Any], figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole record of a run, as it goes into a file."""
    return {
        "schema": SCHEMA,
        "tool": tool,
        "client_version": version("moewe"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "server": dict(server),
        "results": dict(figures),
    }


def publish(
    content: Mapping[str, Any],
    records: Sequence[RequestRecord],
    files: tuple[Path | None, Path | None],
    *,
    title: str,
    interrupted: str | None,
) -> int:
    """Print a record, write it and its picture where they are wanted; return the exit code.

    Args:
        content: see `record`.
        records: of the requests, for the picture.
        files: for the record and for the picture, see `chosen_files`.
        title: of the picture.
        interrupted: what to say of a run that was, and None of one that was not.
    """
    show(content, Console(soft_wrap=not sys.stdout.isatty()))
    put()
    output, picture = files
    if output is not None:
        write_json(output, content)
    if picture is not None:
        plot(latencies(records), title, picture)
    if interrupted is not None:
        print(f"moewe: interrupted; {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0 if content["results"]["completed"] else EXIT_FAILED


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_finite(content), file, indent=2, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(path: Path, flag: str) -> None:
    """Refuse a path that could not be written after the run, before the run.

    Raises:
        ValueError: names the flag.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} {str(path)!r} cannot be written; name a file in a folder that exists")


def show(content: Mapping[str, Any], console: Console) -> None:
    """Print a record: what ran, the figures, the latencies, the reasons of failures."""
    results = content["results"]
    facts = {**content["server"], **{k: v for k, v in content["settings"].items() if v is not None}}
    console.print(f"moewe {content['tool']}", style="bold", markup=False)
    text = ", ".join(f"{key}={_plain(value)}" for key, value in facts.items())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for key, name, form in _ROWS:
        if results.get(key) is not None:
            table.add_row(name, _number(results[key], form))
    console.print(table)
    if shown := [name for name in LATENCIES if f"mean_{name}_ms" in results]:
        table = Table(box=None, pad_edge=False)
        table.add_column("latency, ms")
        for point, _ in POINTS:
            table.add_column(point, justify="right")
        for name in shown:
            table.add_row(LATENCIES[name], *(f"{results[f'{point}_{name}_ms']:.2f}" for point, _ in POINTS))
        console.print(table)
    for reason, count in results.get("errors", {}).items():
        console.print(f"{count} failed: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    for note in results.get("notes", ()):
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _number(value: float, form: str) -> str:
    if form == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    return format(int(value) if form == "d" else value, form)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={_plain(each)}" for key, each in value.items()) + "}"
    return "".join(char if char.isprintable() else "?" for char in str(value))


def _finite(value: Any) -> Any:
    """JSON has no infinity: `inf` becomes a word."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
