"""config.json files as transformers itself writes them, without weights, and what moewe says about them.

Not checkpoints (`fixtures` makes those): a folder here holds a config.json and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moewe.models.config import ConfigError
from moewe.models.families import load_config

from .fixtures import edit_config, new_folder, reference_config

DELETE = object()


def saved_config(name: str, **fields: Any) -> Path:
    """Return a new folder with the config.json that transformers saves for fixture `name` with other `fields`."""
    folder = new_folder(name)
    reference_config(name, **fields).save_pretrained(folder)
    return folder


def edited_config(name: str, **changes: Any) -> Path:
    """Return a new folder with the config.json of fixture `name`, edited by hand; DELETE takes a field away."""
    return edit_config(
        saved_config(name),
        remove=[key for key, value in changes.items() if value is DELETE],
        **{key: value for key, value in changes.items() if value is not DELETE},
    )


def refusal(folder: Path) -> str:
    """Return the one line that refuses the config of `folder`."""
    with pytest.raises(ConfigError) as caught:
        load_config(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, message
    return message
