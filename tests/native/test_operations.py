"""Tests of the table of operations: it knows every C function, and says who does the work."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from moewe.native.build import SOURCES
from moewe.native.library import Outcome
from moewe.native.operations import OPERATIONS, OTHER_FUNCTIONS, Operation

# The beginning of a definition with C linkage: "void moewe_name(".
_FUNCTION = re.compile(r'^(?:extern "C" )?[\w ]+[ *](moewe_\w+)\(', re.MULTILINE)


def test_every_function_of_the_library_is_in_the_table() -> None:
    found = {name for path in SOURCES.glob("*.cpp") for name in _FUNCTION.findall(path.read_text())}
    known = {operation.function for operation in OPERATIONS} | set(OTHER_FUNCTIONS)
    assert "moewe_linear" in found
    assert not found - known, "new functions: add them to native/operations.py"


def test_names_are_told_apart() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize(
    ("isa", "matrix", "path"),
    [
        ("amx", True, "native amx"),
        ("amx", False, "native avx512"),
        ("avx512", True, "native avx512"),
        ("avx2", False, "native avx2"),
    ],
)
def test_who_does_the_work(isa: str, matrix: bool, path: str) -> None:
    library: Any = SimpleNamespace(moewe_some=1)
    outcome = Outcome(library, isa, "")
    assert Operation("some", "moewe_some", matrix=matrix).path(outcome) == path
    assert Operation("other", "moewe_other", matrix=matrix).path(outcome) == "torch"
    assert Operation("some", "moewe_some").path(Outcome(None, None, "")) == "torch"
