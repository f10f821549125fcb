"""Whether a checkpoint has the tensors that its config calls for, by the headers of its files alone.

Not a loader (loading.py), and no torch: a plan and a start ask before anything heavy is there.
"""

from __future__ import annotations

from pathlib import Path

from .checkpoint import open_checkpoint
from .config import ModelConfig
from .name_map import match_tensors


def check_weights(path: Path, config: ModelConfig) -> None:
    """Raise the ConfigError that loading would raise for missing, unknown or misshapen tensors; reads only headers."""
    with open_checkpoint(path) as checkpoint:
        match_tensors(checkpoint.tensors, config)
