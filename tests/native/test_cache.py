"""Tests of the user's cache folder and of its lock (how builders use it: test_build.py, models/test_demo.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moewe.native.cache import cache_folder, locked


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEWE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "moewe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "moewe"
    monkeypatch.setenv("MOEWE_CACHE_DIR", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_is_told_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MOEWE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(FileNotFoundError, match="set MOEWE_CACHE_DIR"):
        cache_folder()


def test_a_lock_excludes_and_goes_away(tmp_path: Path) -> None:
    path, waits = tmp_path / "lock", []
    with locked(path, on_wait=lambda: waits.append(1)):
        with (
            pytest.raises(TimeoutError, match="lock for 0 s"),
            locked(path, on_wait=lambda: waits.append(2), seconds=0),
        ):
            raise AssertionError("two hold it")
    assert waits == [2] and not path.exists()


def test_a_lock_file_that_nobody_holds_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("of a process that is dead")
    with locked(path, on_wait=lambda: pytest.fail("nobody holds it")):
        assert path.exists()
    assert not path.exists()


def test_a_lock_that_its_holder_removed_is_tried_anew(tmp_path: Path) -> None:
    """Who waited on the removed file must not believe that it holds the new one."""
    path = tmp_path / "lock"
    outer = locked(path, on_wait=lambda: None)
    outer.__enter__()

    def holder_ends_and_another_begins() -> None:
        outer.__exit__(None, None, None)
        path.touch()

    with locked(path, on_wait=holder_ends_and_another_begins, seconds=10):
        assert os.path.samestat(path.stat(), path.stat())
        with pytest.raises(TimeoutError), locked(path, on_wait=lambda: None, seconds=0):
            raise AssertionError("the new file is not locked")


def test_a_failure_inside_frees_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "lock", on_wait=lambda: None):
        raise ZeroDivisionError
    with locked(tmp_path / "lock", on_wait=lambda: pytest.fail("it was freed")):
        pass
