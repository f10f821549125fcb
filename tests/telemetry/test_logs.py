"""Log lines: one JSON object a line whatever is in them, text without a stranger's line breaks, alike in children."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from moewe.telemetry.logs import JsonLines, TextLines, about_request, hand_down


def record(message: str, *args: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("moewe.runtime.engine", logging.WARNING, "f.py", 3, message, args, None)
    made.__dict__.update(more)
    return made


def test_a_json_line_says_when_who_what_and_for_which_request() -> None:
    line = JsonLines("rank 3").format(record("took %d of %s", 3, "\u00e9", created=0.25, msecs=250.0))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z", "level": "warning", "logger": "moewe.runtime.engine", "process": "rank 3",
        "message": "took 3 of \u00e9",
    }  # fmt: skip
    with about_request("abc"):
        assert json.loads(JsonLines("x").format(record("a")))["request_id"] == "abc"
        assert json.loads(JsonLines("x").format(record("a", request_id="other")))["request_id"] == "other"
        assert "(abc)" in TextLines("x").format(record("a"))
    assert "request_id" not in json.loads(JsonLines("x").format(record("a")))


@pytest.mark.parametrize(
    "nasty", ["a\nb", "a\r\nb", "a\x1b[2Jb", "a\u2028b", 'a"}\n{"level": "error"', "a\x00b", "\ud800"]
)
def test_no_message_breaks_out_of_its_line(nasty: str) -> None:
    line = JsonLines("x").format(record("got %s", nasty))
    assert len(line.splitlines()) == 1 and json.loads(line)["message"] == f"got {nasty}"
    text = TextLines("x").format(record("got %s", nasty))
    assert len(text.splitlines()) == 1 and "\x1b" not in text and "\x00" not in text


def test_tracebacks_are_a_field_or_stand_below() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    entry = json.loads(JsonLines("x").format(made))
    assert entry["message"] == "failed" and "ValueError: a\nb" in entry["exception"]
    assert "Traceback" in TextLines("x").format(made).splitlines()[1]


CHILD = """
import logging, warnings
from moewe.runtime.processes.child import log_as
log_as("rank 1")
logging.getLogger("moewe.a").debug("quiet %s", "one")
logging.getLogger("moewe.a").info("two")
logging.getLogger("torch").info("of a library")
logging.getLogger("torch").warning("three")
warnings.warn("four")
"""


@pytest.mark.parametrize(("level", "expected"), [(None, ["two", "three"]), ("warning", ["three"]), ("debug", None)])
def test_children_log_in_the_form_that_was_asked_for(level: str | None, expected: list[str] | None) -> None:
    environment: dict[str, str] = {}
    hand_down(level, "json", environment)
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, timeout=60)
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 0 and {entry["process"] for entry in entries} == {"rank 1"}
    messages = [entry["message"] for entry in entries]
    assert "four" in messages.pop()  # Python's own warnings are lines too
    assert messages == (["quiet one", "two", "of a library", "three"] if expected is None else expected)


def test_children_of_whom_nothing_was_asked_write_text_from_info_on() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env={}, timeout=60)
    assert done.stderr.splitlines()[0].endswith("INFO [rank 1] two")
