"""Which kernels the ranks on a CPU will run, settled before any of them is started.

Not the compilation (native/build.py) and not a kernel. Whoever starts replicas calls it; ranks find a finished library.
"""

from __future__ import annotations

import logging

from ..native.library import prepare
from .config import EngineConfig

log = logging.getLogger(__name__)


def prepare_kernels(config: EngineConfig) -> None:
    """Compile the native kernels if this machine has not yet, and say which are used; nothing on a GPU."""
    if config.parallel.device != "cpu":
        return
    outcome = prepare()
    if outcome.library is not None:
        log.info("CPU kernels: native, %s", outcome.why)
