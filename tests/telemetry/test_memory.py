"""Memory of processes as a made-up /proc tells it, and as the real one does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moewe.telemetry import peak_of, peak_of_family, resident_of


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for pid, parent, peak in ((1, 0, 9000), (10, 1, 100), (11, 10, 20), (12, 11, 3), (13, 11, 4), (14, 1, 9000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx: y\nPid:\t{pid}\nPPid:\t{parent}\nVmHWM:\t {peak} kB\n")
    (tmp_path / "15").mkdir()
    (tmp_path / "15" / "status").write_text("Name:\tkthread\nPid:\t15\nPPid:\t10\n")
    return tmp_path


def test_a_family_is_a_process_and_all_below_it(proc: Path) -> None:
    assert peak_of_family(10, proc) == 127 * 1024
    assert peak_of_family(99, proc) is None


def test_named_processes_and_their_parents_count_once(proc: Path) -> None:
    assert peak_of([10, 12, 13], proc) == 127 * 1024  # 11 is the parent of two; init is nobody's memory
    assert peak_of([10, 10, 15, 99], proc) == 100 * 1024
    assert peak_of([99], proc) is None


@pytest.mark.parametrize(
    ("text", "pages"), [("900 41 7 0", 41), ("900", None), ("900 x", None), ("", None), (None, None)]
)
def test_what_is_resident_is_known_where_the_kernel_says_it(
    tmp_path: Path, text: str | None, pages: int | None
) -> None:
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7" / "statm").write_text(text)
    assert resident_of(7, tmp_path) == (None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_holds_something() -> None:
    assert (resident_of() or 0) > 1 << 20
    own = peak_of_family(os.getpid())
    assert own is not None and own > 1 << 20
