"""Joules that the packages and memory of this host have used, from Linux' powercap (RAPL); nothing where there is none.

Not GPUs (native/gpu_counters.py) and not a model of power. RAPL counts what a whole host uses, whoever uses it. Its
counters wrap after some minutes to hours: read them oftener. Units: joules, seconds of the monotonic clock.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
_ZONE, _SUBZONE = re.compile(r"intel-rapl:\d{1,3}"), re.compile(r"intel-rapl:(\d{1,3}):\d{1,3}")
_PACKAGE = re.compile(r"package-\d{1,3}(-die-\d{1,3})?|psys")
_MOST_ZONES = 32  # series, whatever the files say
_MOST_CHARACTERS = 64  # of a file
_EVERY_S = 1.0


@dataclass
class WrappingCounter:
    """Adds up what a counter gains that begins at 0 again now and then.

    Attributes:
        most: its largest value; 0 where it is not known: then what a wrap hid is lost.
        total: what it has gained since the first reading.
    """

    most: int = 0
    total: int = 0
    _last: int | None = field(default=None, repr=False)

    @property
    def was_read(self) -> bool:
        """There was a reading."""
        return self._last is not None

    def read(self, value: int) -> None:
        """Take a reading; one that the counter cannot have is left out."""
        if value < 0 or (self.most and value > self.most):
            return
        if self._last is not None:
            gained = value - self._last
            if gained < 0:
                gained = gained + self.most + 1 if self.most else 0
            self.total += gained
        self._last = value


@dataclass
class _Zone:
    """A counter in microjoules and the file that it is read from."""

    path: Path
    counter: WrappingCounter


class HostEnergy:
    """Reads the counters of one host.

    Packages count what their memory uses or do not, by the machine; memory (`dram`) stands apart where it is counted,
    and `psys` is all of the platform.

    Args:
        folder: the kernel's powercap.
        clock: monotonic seconds.
    """

    def __init__(self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._zones = {name: _Zone(path / "energy_uj", WrappingCounter(_range(path))) for name, path in _zones(folder)}
        self._read_at = float("-inf")
        refused = [zone for zone in self._zones.values() if _number(zone.path) is None]
        if refused:
            log.info("%s is there and cannot be read: energy is not in /metrics (root may read it)", refused[0].path)
        self.read()

    def read(self) -> None:
        """Take readings, once a second at most; a counter that cannot be read keeps its total."""
        now = self._clock()
        if now - self._read_at < _EVERY_S:
            return
        self._read_at = now
        for zone in self._zones.values():
            if (value := _number(zone.path)) is not None:
                zone.counter.read(value)

    def joules(self) -> dict[str, float]:
        """Return what each zone has used since this object was made; those that could never be read are left out."""
        found = ((name, zone.counter) for name, zone in self._zones.items())
        return {name: 1e-6 * counter.total for name, counter in found if counter.was_read}


def _zones(folder: Path) -> list[tuple[str, Path]]:
    """Return names and folders of what is counted: packages, the platform, and memory below a package."""
    try:
        paths = {path.name: path for path in sorted(folder.iterdir())[: 8 * _MOST_ZONES]}
    except OSError:
        return []
    found: dict[str, Path] = {}
    for name, path in paths.items():
        above = _SUBZONE.fullmatch(name)
        if above is not None and _text(path / "name") == "dram":
            package = _text(paths.get(f"intel-rapl:{above[1]}", path) / "name")
            if _PACKAGE.fullmatch(package):
                found.setdefault(f"{package}-dram", path)
        elif _ZONE.fullmatch(name) and _PACKAGE.fullmatch(label := _text(path / "name")):
            found.setdefault(label, path)
    return list(found.items())[:_MOST_ZONES]


def _range(path: Path) -> int:
    return max(0, _number(path / "max_energy_range_uj") or 0)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_MOST_CHARACTERS).strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
