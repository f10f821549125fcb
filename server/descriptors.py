"""How many files and connections this process may have open.

Units: descriptors.
"""

from __future__ import annotations

import contextlib
import resource

WANTED = 65536


def raise_descriptor_limit() -> None:
    """Each connection takes a descriptor; the usual soft limit of 1024 is too low for a server or its load."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
