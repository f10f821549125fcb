"""How far the demo build is, shown on stderr: a rich bar on a terminal, a line per stage elsewhere.

Not used when a caller brings its own `on_progress`.
Amounts are bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[str, int, int], None]


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """Yield an `on_progress(stage, done, total)` that draws; closes the bar on the way out."""
    if sys.stderr.isatty():
        yield from _bar()
    else:
        yield _lines()


def _bar() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("demo: {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    tasks = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total or None)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield show


def _lines() -> OnProgress:
    seen: dict[str, None] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen[stage] = None
            size = f" ({total / 1e6:.0f} MB)" if total else ""
            print(f"demo: {stage}{size}", file=sys.stderr, flush=True)

    return show
