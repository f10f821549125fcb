"""Which matrices of a checkpoint are quantised, and how.

Not a parser of config.json and no tensor names of a family: patterns are compared with the modules it is given.
Patterns come from strangers, so they are compared by plain search; only `*` is special and stands for any text.
"""

from __future__ import annotations

from dataclasses import dataclass

from .scheme import QuantScheme


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantisation of one checkpoint.

    Attributes:
        scheme: of every matrix that is quantised.
        excluded: patterns of modules that are not (`modules_to_not_convert`).
    """

    scheme: QuantScheme
    excluded: tuple[str, ...] = ()

    def excludes(self, module: str) -> bool:
        """True when a pattern is the beginning of `module` up to a dot or its end, or the end of `module`."""
        return any(_begins(module, pattern) or module.endswith(pattern) for pattern in self.excluded)


def _begins(module: str, pattern: str) -> bool:
    first, *rest = pattern.split("*")
    if not module.startswith(first):
        return False
    position = len(first)
    if not rest:
        return _is_boundary(module, position)
    for piece in rest[:-1]:
        found = module.find(piece, position)
        if found < 0:
            return False
        position = found + len(piece)
    found = module.find(rest[-1], position)
    while found >= 0:
        if _is_boundary(module, found + len(rest[-1])):
            return True
        found = module.find(rest[-1], found + 1)
    return False


def _is_boundary(module: str, position: int) -> bool:
    return position == len(module) or module[position] == "." or (position > 0 and module[position - 1] == ".")
