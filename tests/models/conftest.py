"""What tests of loading share: the sizes of what was really read. Not checkpoints (tests/support/fixtures.py)."""

import os

import pytest


@pytest.fixture
def read_sizes(monkeypatch):
    """Sizes of all reads of this process, in bytes, as they happen."""
    real, sizes = os.preadv, []

    def counting(fd, buffers, offset):
        sizes.append(real(fd, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return sizes
