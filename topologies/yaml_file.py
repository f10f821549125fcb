"""Reads a YAML file that must be one mapping: safe types only, no key twice, bounded size.

Not a schema: callers check the keys. Layout files and `--config` files are read with it.
Units: bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .spec import TopologyError

MAX_FILE_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would answer by taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep=deep)


def parse_yaml_mapping(text: str, *, where: str, example: str = "topology: EP2DP1") -> dict[str, Any]:
    """Return the mapping that `text` holds.

    Raises:
        TopologyError: not YAML, not a mapping, or a key that is not text; the message begins with `where` and
            ends with `example`, a line that such a file may hold.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: builds plain types only
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise TopologyError(f"{where} is not valid YAML: {_one_line(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise TopologyError(f"{where} must be a mapping of names to values, like `{example}`")
    return data


def read_yaml_mapping(path: Path, *, example: str = "topology: EP2DP1") -> dict[str, Any]:
    """Return the mapping in the file `path`; errors name the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # whatever it is: a device has no end, and no size either
        if len(content) > MAX_FILE_BYTES:
            raise TopologyError(f"file {str(path)!r} is over {MAX_FILE_BYTES:,} bytes; is it the right file?")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TopologyError(f"file {str(path)!r} cannot be read: {reason}") from error
    return parse_yaml_mapping(text, where=f"file {str(path)!r}", example=example)


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__
