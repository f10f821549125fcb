"""`DemoError`: why the demo checkpoint cannot be built, in one line with the fix.

Not for programming mistakes, which are assertions or plain exceptions.
No shapes, no units.
"""

from __future__ import annotations


class DemoError(ValueError):
    """What a user can cause or cure: no package index, a wrong wheel, a directory that holds something else."""
