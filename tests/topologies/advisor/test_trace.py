"""An audit log replays to the advice that it holds, and whatever else a file may be is one line about where."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.topologies.advisor.advisor import Advisor
from moewe.topologies.advisor.records import AdviceError
from moewe.topologies.advisor.trace import AppliedLine, FactsLine, WindowLine, encode, read_trace, replay
from tests.topologies.advisor.test_advisor import INSIDE, SHM, WIDE, crossing, facts, window

KNOWN = facts(INSIDE, [SHM, crossing(1e-3, "")])


def written(path: Path) -> list[str]:
    """Write the log of a server that changes its layout; return the verdicts."""
    advisor = Advisor(KNOWN)
    verdicts = []
    with path.open("wb") as file:
        file.write(encode(FactsLine(version=1, facts=advisor.facts)))
        for rows in (60, 64, 70, 66):
            seen = window(advisor.facts, rows=rows)
            advice = advisor.observe(seen)
            verdicts.append(advice.verdict)
            file.write(encode(WindowLine(seen=seen, advice=advice)))
        file.write(encode(AppliedLine(time=1e9, before=INSIDE, after=WIDE.format(""), outcome="done", seconds=9.5)))
        after = facts(WIDE.format(""), [SHM, crossing(1e-3, "")])
        file.write(encode(FactsLine(version=1, facts=after)))
        seen = window(after)
        file.write(encode(WindowLine(seen=seen, advice=Advisor(after).observe(seen))))
    return [*verdicts, "observing"]


def test_a_log_replays_to_the_same_advice(tmp_path: Path) -> None:
    path = tmp_path / "advice.jsonl"
    verdicts = written(path)
    again = list(replay(path, read_trace(path)))
    assert [one.advice.verdict for one in again] == verdicts and verdicts[2] == "change"
    assert all(one.is_same for one in again) and all(one.recorded is not None for one in again)
    # Another figure in a window leads to another advice, and that shows.
    path.write_bytes(path.read_bytes().replace(b'"rows":70', b'"rows":50'))
    assert [one.is_same for one in replay(path, read_trace(path))].count(False) >= 1


def test_a_line_that_was_cut_short_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "advice.jsonl"
    verdicts = written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + encode(WindowLine(seen=window(KNOWN)))[:200] + b"\n" + whole)  # the next server went on
    again = list(replay(path, read_trace(path)))
    assert [one.advice.verdict for one in again] == verdicts * 2 and all(one.is_same for one in again)
    (warning,) = caplog.messages
    assert f"line {len(whole.splitlines()) + 1} was not written to its end" in warning


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "line 1 is no line"), (b"[]\n", "line 1"), (b'{"record":"other"}\n', "line 1"), (b"\xff\n", "line 1"),
        (encode(WindowLine(seen=window(KNOWN))), "before any facts"),
        (encode(FactsLine(version=1, facts=KNOWN)) + b"\n[[[", "line 3"),
        (encode(FactsLine(version=2, facts=KNOWN)), "version=2"),
        (encode(FactsLine(version=1, facts=KNOWN)).replace(b'"num_devices":4', b'"num_devices":99999'), "99999"),
        (encode(FactsLine(version=1, facts=KNOWN)).replace(b"EP2DP2", b"EP2DPx", 1), "EP2DPx"),
        (encode(FactsLine(version=1, facts=KNOWN)).replace(b'"memory_bandwidth":5000000000.0', b'"memory_bandwidth":0')
         + encode(WindowLine(seen=window(KNOWN))), "cannot be judged"),
        (encode(WindowLine(seen=window(KNOWN))).replace(b'"seconds":30.0', b'"seconds":-30.0'), "seconds=-30.0"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused_with_the_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "advice.jsonl"
    path.write_bytes(content)
    with pytest.raises(AdviceError, match=why) as error:
        list(replay(path, read_trace(path)))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdviceError, match=r"nothing.jsonl cannot be read"):
        list(read_trace(tmp_path / "nothing.jsonl"))
