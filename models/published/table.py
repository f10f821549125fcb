"""The configs of published models that come with moewe, by name.

Not weights and not a download: the fields of a config.json that sizes and times depend on, with their source.
Units: as in config.json.
"""

from __future__ import annotations

from importlib import resources

from ..config import ConfigError, ModelConfig
from ..families import parse_content
from ..json_fields import parse_object, show


def published_names() -> tuple[str, ...]:
    """Return the names of the table, sorted."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def published_config(name: str) -> ModelConfig:
    """Return the normalised config of the model called `name`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in published_names():
        raise ConfigError(f"model = {show(name)} is not in the table; it has {', '.join(published_names())}")
    file = resources.files(__package__) / f"{name}.json"
    entry = parse_object(file.read_bytes(), file.name)
    return parse_content(entry["config"], f"{name}.json")
