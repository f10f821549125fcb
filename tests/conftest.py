"""What holds for every test: engines here and below fail where one in production would mend itself, and start quickly.

The environment, which child processes inherit, is set before anything else is imported. A command that sets up logging
leaves none of it behind.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("MOEWE_STRICT_BOOKS", "1")
# A rank of every engine that is started measures how fast it reads memory: here a small buffer will do.
os.environ.setdefault("MOEWE_QUICK_MEASURE", "1")
# Two test processes on two cores: more threads would only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels for GPUs run in Triton's interpreter, which must be known before Triton is imported, and transformers does.
os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: it lives to the end."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("moewe")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
