"""What a person sees in the terminal: bars while loading and counting, text as it is generated, safe to print.

Not a command (server/commands/local.py). Bars go to stderr, text to stdout.
Units: bytes.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ...runtime.messages import Capturing, Loading


class _Amount(DownloadColumn):
    """Bytes, or where the task counts something else, its number."""

    def render(self, task: Task) -> Text:
        if not task.fields.get("counts"):
            return super().render(task)
        return Text(f"{int(task.completed)}/{int(task.total or 0)}", style="progress.download")


class _Speed(TransferSpeedColumn):
    """Bytes a second; of what is counted nothing."""

    def render(self, task: Task) -> Text:
        return Text() if task.fields.get("counts") else super().render(task)


class LoadingBars:
    """One bar for the bytes that all ranks load, then for the steps that they capture; silent off a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._done: dict[tuple[int, int], tuple[int, int]] = {}
        self._captured: dict[tuple[int, int], tuple[int, int]] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(binary_units=True),
            _Speed(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None

    @property
    def visible(self) -> bool:
        """True when somebody can see the bar."""
        return self._console.is_terminal

    def update(self, replica: int, message: Loading | Capturing) -> None:
        """Take a rank's report."""
        if isinstance(message, Capturing):
            self._captured[replica, message.rank] = (message.done, message.total)
            done, total = (sum(column) for column in zip(*self._captured.values(), strict=True))
            if self._task is not None:
                self._progress.update(
                    self._task, completed=done, total=total, description="capturing CUDA graphs", counts=True
                )
            return
        self._done[replica, message.rank] = (message.done_bytes, message.total_bytes)
        done, total = (sum(column) for column in zip(*self._done.values(), strict=True))
        if self._task is None:
            self._task = self._progress.add_task("loading weights", total=total)
        stage = "loading weights" if done < total else "weights loaded, warming up"
        self._progress.update(self._task, completed=done, total=total, description=stage)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw while the body runs."""
        with self._progress:
            yield


@contextmanager
def counting(what: str, total: int, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Draw a bar on stderr while the body runs, where that is a terminal; yields what moves it on by one."""
    console = console or Console(file=sys.stderr)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
    task = bar.add_task(what, total=total)
    with bar:
        yield lambda: bar.advance(task)


def printable(text: str) -> str:
    """Return `text` without control characters but newline and tab: a model must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
