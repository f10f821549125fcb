"""Where moewe keeps what it builds once for this user, and the lock that lets one process build while others wait.

Not what is built (build.py; models/demo builds a checkpoint). A lock ends with its process, however that ends.
Units: seconds.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.05


def cache_folder() -> Path:
    """Return the folder: MOEWE_CACHE_DIR, else XDG_CACHE_HOME/moewe, else ~/.cache/moewe.

    Raises:
        FileNotFoundError: none is set and this user has no home.
    """
    try:
        if own := os.environ.get("MOEWE_CACHE_DIR"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moewe"
    except RuntimeError:  # a container with a user that it does not know
        raise FileNotFoundError("this user has no home directory; set MOEWE_CACHE_DIR to a folder") from None


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None], seconds: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is made for it and goes away with it.

    Args:
        path: in a folder that exists.
        on_wait: called once if another process holds it.
        seconds: how long to wait at most; None: as long as its holder lives.

    Raises:
        TimeoutError: the holder lives and did not end in time.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    waited = False
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            while not _taken(file):
                if not waited:
                    on_wait()
                    waited = True
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {seconds:.0f} s")
                time.sleep(_POLL_SECONDS)
            if not _is_same_file(file, path):  # its holder removed it before we got the lock: try the new one
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(file)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
