"""Counts calls of native functions by name, of everything that loads the kernels while a test counts.

Not a kernel: calls go on to the library. Who has looked up a function before counts nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moewe.native import library


class CountedFunction:
    """A function of the library, and its declarations."""

    def __init__(self, function: Any, name: str, calls: Counter[str]) -> None:
        self.__dict__.update(_function=function, _name=name, _calls=calls)

    def __call__(self, *args: Any) -> Any:
        self._calls[self._name] += 1
        return self._function(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)


class CountedLibrary:
    """The library with all its functions counted in `calls`."""

    def __init__(self, loaded: Any, calls: Counter[str]) -> None:
        self._loaded, self._calls = loaded, calls

    def __getattr__(self, name: str) -> Any:
        return CountedFunction(getattr(self._loaded, name), name, self._calls)


def count_native_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the calls by name, which go up until the end of the test."""
    calls: Counter[str] = Counter()
    loaded = library.outcome()
    assert loaded.library is not None
    monkeypatch.setattr(library, "_outcome", replace(loaded, library=CountedLibrary(loaded.library, calls)))
    return calls
