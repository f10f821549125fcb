"""A stage of gpu_check in a process of its own, so that a kernel that never returns or breaks the GPU loses one item.

Not what a stage does (gpu_check_stages.py). Units: seconds, points in time of the monotonic clock, which all processes
of a machine share.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu_check_plan import ENDED, ROOT, Record, running_file

NO_GPU, WRONG, NO_TIME = 2, 1, 3  # exit codes of the script
UNSOUND = 75  # of a stage whose GPU takes no more work in its process
LATE_S = 5.0  # before its time is over, from when on a stage begins nothing
_POLL_S = 0.1
_GONE_S = 10.0  # a driver takes time to stop a kernel
_RESTART_S = 20.0  # with less time left no further process is begun
_PR_SET_PDEATHSIG = 1
_OTHERS = ("benchmarks", "moewe", "tests")  # folders of the repository that are no package of moewe


def watch(command: Sequence[str], path: Path, until: float, env: Mapping[str, str] | None = None) -> int | None:
    """Run a stage until it is done or its time is over; what ends its process is an error of the item under way.

    Args:
        command: of the stage; `--until TIME` is added, and `--keep-errors` where it is begun again.
        path: of its record.
        until: when its time is over, for ending its process too, unless a driver holds that.
        env: its environment; None: as here.

    Returns:
        The stage's exit code: 0 done, as far as there was time, NO_GPU; others say that it could not begin. None: time
        ended it.
    """
    again: list[str] = []
    while True:
        running_file(path).unlink(missing_ok=True)
        child = subprocess.Popen([*command, "--until", repr(until - LATE_S), *again], start_new_session=True, env=env)
        try:
            why = _wait(child, path, until)
        finally:
            is_gone = _end(child)  # and whatever it started
        name, ended = _under_way(path), child.returncode
        if why is None and (ended != UNSOUND and name is None):
            return ended
        over = why is not None and time.monotonic() >= until
        if name is not None and ended != UNSOUND:
            _note(path, name, why or f"its process ended with {_told(ended)}", left_out=over)
        if not is_gone:
            print("  its process cannot be ended: the driver holds it; nothing more is run", file=sys.stderr)
        if over or not is_gone or until - time.monotonic() < _RESTART_S:
            return None
        print(f"  {name}: {why or _told(ended)}; begun again behind it", file=sys.stderr, flush=True)
        again = ["--keep-errors"]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a stage: where moewe is not installed, its packages are linked together in `folder`."""
    paths, safe = [str(ROOT)], {}
    if importlib.util.find_spec("moewe.native") is None:
        own = folder.resolve() / "moewe"
        own.mkdir()
        packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in _OTHERS]
        for path in (*packages, *(ROOT / "moewe").iterdir()):
            (own / path.name).symlink_to(path)
        # Without the folder of the script and the current one, in which `moewe` has no packages.
        paths, safe = [str(folder.resolve()), str(ROOT)], {"PYTHONSAFEPATH": "1"}
    paths += [path for path in (os.environ.get("PYTHONPATH"),) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | safe


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that began it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait(child: subprocess.Popen[bytes], path: Path, until: float) -> str | None:
    """Return None once it has ended, or why it must be ended."""
    while child.poll() is None:
        now, item = time.monotonic(), _running(path)
        if now >= until:
            return "time was over while it ran"
        if item is not None and now >= item[1]:
            return "it did not return in time"
        time.sleep(_POLL_S)
    return None


def _end(child: subprocess.Popen[bytes]) -> bool:
    """End the whole group; returns whether the process is gone."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _running(path: Path) -> tuple[str, float] | None:
    try:
        name, most = json.loads(running_file(path).read_text())
    except (OSError, ValueError):  # none, or one that is being written
        return None
    return str(name), float(most)


def _under_way(path: Path) -> str | None:
    item = _running(path)
    return None if item is None else item[0]


def _note(path: Path, name: str, why: str, *, left_out: bool) -> None:
    """Write into the record what became of the item that ran last."""
    record = Record.read(path)
    if record is None or name in record.results:
        return
    if left_out:
        record.left_out[name] = why
    else:
        record.left_out.pop(name, None)
        record.results[name] = {"error": why, ENDED: True}
    record.write()


def _told(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
