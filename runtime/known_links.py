"""What the ranks of this machine measured of their links last, kept for `--topology auto`, which runs before any rank.

Not the measuring (runtime/link_measuring.py) and not the choice (topologies/choice.py). A file in the cache of this
user; whatever is wrong with it counts as nothing known. Units: seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import tempfile
from pathlib import Path

import msgspec

from ..native.cache import cache_folder
from ..topologies.exchange_cost import ExchangeCost

log = logging.getLogger(__name__)

_FILE = "links.json"
_MOST_BYTES, _MOST_MACHINES = 1 << 16, 32


def remember(device: str, cost: ExchangeCost) -> None:
    """Keep what an exchange within a domain of this machine costs, in place of what was known; failing is no harm."""
    with contextlib.suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        known = _read(folder / _FILE)
        known.pop(_key(device), None)
        known[_key(device)] = cost
        newest = dict(list(known.items())[-_MOST_MACHINES:])
        handle, name = tempfile.mkstemp(dir=folder, prefix=_FILE)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(newest))
            os.replace(name, folder / _FILE)
        except OSError:
            os.unlink(name)
            raise


def recall(device: str) -> ExchangeCost | None:
    """Return what was measured on this machine; None where nothing was."""
    with contextlib.suppress(OSError):
        return _read(cache_folder() / _FILE).get(_key(device))
    return None


def _key(device: str) -> str:
    return f"{platform.node()} {device}"


def _read(path: Path) -> dict[str, ExchangeCost]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError("it is too large")
        known = msgspec.json.decode(content, type=dict[str, ExchangeCost])
    except FileNotFoundError:
        return {}
    except ValueError as error:  # of msgspec, too
        log.warning("%s is not what was written there and is not used: %s", path, error)
        return {}
    return {key: cost for key, cost in known.items() if _is_sound(cost)}


def _is_sound(cost: ExchangeCost) -> bool:
    numbers = (cost.fixed_s, cost.within_s, cost.between_s)
    return all(math.isfinite(number) and number >= 0 for number in numbers)
