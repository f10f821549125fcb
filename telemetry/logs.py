"""Log lines of every process of moewe: as text for people, or one JSON object a line for collectors.

Not metrics (counters.py) and not what a command prints. Whatever a stranger puts into a message stays on its line.
Units: times are ISO 8601 in UTC in JSON, local time in text.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# How a process tells those that it starts, which inherit its environment.
_FORMAT_VARIABLE, _LEVEL_VARIABLE = "MOEWE_LOG_FORMAT", "MOEWE_LOG_LEVEL"
_request_id: ContextVar[str | None] = ContextVar("moewe_request_id", default=None)
# C0, DEL and C1, and the two separators that some readers take for a line break.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROLS |= {ord("\t"): "\t", ord("\n"): "\\n", ord("\r"): "\\r"}


def set_up_logs(process: str, *, level: str = "info", form: str = "text") -> None:
    """Write log lines of this process to stderr: ours from `level` on, of libraries only warnings unless all is told.

    Args:
        process: how lines call it, e.g. `moewe` or `rank 3`.
        level: one of LEVELS.
        form: one of FORMATS.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    root = "warning" if level == "info" else level
    logging.basicConfig(handlers=[handler], level=root.upper(), force=True)
    logging.getLogger("moewe").setLevel(level.upper())
    logging.captureWarnings(form == "json")


def hand_down(level: str | None, form: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let processes that are started from now on log alike; None leaves their level as it is."""
    environment[_FORMAT_VARIABLE] = form
    if level is not None:
        environment[_LEVEL_VARIABLE] = level


def set_up_inherited_logs(process: str) -> None:
    """Set up logs as the process that started this one was told; unknown words mean the defaults."""
    level, form = os.environ.get(_LEVEL_VARIABLE, ""), os.environ.get(_FORMAT_VARIABLE, "")
    set_up_logs(process, level=level if level in LEVELS else "info", form=form if form in FORMATS else "text")


def json_is_wanted() -> bool:
    """Return True when this process writes its log as JSON: then nothing else shall stand between the lines."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


@contextlib.contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """Mark the log lines that are written inside, by this task and by those it starts, with a request id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def request_id_of(record: logging.LogRecord) -> str | None:
    """Return the request that a line is about: as its `extra` says, else that of the running task."""
    return getattr(record, "request_id", None) or _request_id.get()


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, process, message, and request_id and exception where there are any.

    Args:
        process: how lines call it.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if (request_id := request_id_of(record)) is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)  # ASCII only: no separator of lines stays in it


class TextLines(logging.Formatter):
    """Time, level, process and message on one line; a traceback below it.

    Args:
        process: how lines call it.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{process}] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the traceback; control characters are written out."""
        request_id = request_id_of(record)
        marked = record.message if request_id is None else f"{record.message} ({request_id})"
        record.message = marked.translate(_CONTROLS)
        return super().formatMessage(record)
