"""What the ranks of this machine measured of their links, kept for `--topology auto` and for advice on other layouts.

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
from dataclasses import replace
from pathlib import Path

import msgspec

from ..native.cache import cache_folder
from ..topologies import Topology, TopologyError, parse_topology
from ..topologies.exchange_cost import ExchangeCost, LayoutLink

log = logging.getLogger(__name__)

_FILE = "links.json"
_MOST_BYTES, _MOST_ENTRIES = 1 << 17, 256


def remember(device: str, topology: Topology, cost: ExchangeCost) -> None:
    """Keep what an exchange of a layout costs on this machine, in place of what was known; failing is no harm.

    Replicas and redundant slots make no difference; domains and their link do.
    """
    with contextlib.suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        known = _read(folder / _FILE)
        key = _key(device, f"{_group(topology).long()} {cost.name}")
        known.pop(key, None)
        known[key] = cost
        newest = dict(list(known.items())[-_MOST_ENTRIES:])
        handle, name = tempfile.mkstemp(dir=folder, prefix=_FILE)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(newest))
            os.replace(name, folder / _FILE)
        except OSError:
            os.unlink(name)
            raise


def recall(device: str) -> tuple[LayoutLink, ...]:
    """Return what was measured on this machine, the newest last."""
    found = []
    start = _key(device, "")
    with contextlib.suppress(OSError):
        for key, cost in _read(cache_folder() / _FILE).items():
            with contextlib.suppress(TopologyError):
                if key.startswith(start):
                    topology = parse_topology(key[len(start) :].partition(" ")[0])
                    found.append(LayoutLink(topology=topology.long(), cost=cost))
    return tuple(found)


def _group(topology: Topology) -> Topology:
    return replace(topology, dp=1, red=0)


def _key(device: str, layout: str) -> str:
    return f"{platform.node()} {device} {layout}"


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
