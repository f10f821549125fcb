"""The file of `--advice-log`: whole lines are added to it, also where a disk was full for a while.

Not what stands in a line (topologies/advisor/trace.py). Units: bytes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...topologies.advisor.trace import Line, encode

log = logging.getLogger(__name__)

MOST_WAITING = 4 << 20  # hours of windows


def check_log(path: str) -> None:
    """Refuse a log that cannot be written, before anything is loaded.

    Raises:
        ValueError: names the flag and the file.
    """
    try:
        with Path(path).open("ab"):
            pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--advice-log {path!r} cannot be written: {why}; name a file in a folder of yours") from None


class AdviceLog:
    """Adds lines to a file.

    What a full disk does not take, or takes a part of, is written before the next line. A line that an earlier server
    could not end is left as it is, and the first one begins below it.

    Args:
        path: of the file; None writes nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._waiting = b"\n" if self._path is not None and _ends_within_a_line(self._path) else b""

    def write(self, line: Line) -> None:
        """Add a line, as far as it can be written: advice is given all the same."""
        if self._path is None:
            return
        if len(self._waiting) < MOST_WAITING:
            self._waiting += encode(line)
        try:
            with self._path.open("ab", buffering=0) as file:  # no buffer: it says how much was taken
                while self._waiting:
                    self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            log.warning("advice is not written to %s: %s", self._path, error.strerror)


def _ends_within_a_line(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it is empty, or may not be read
        return False
