"""From what a user calls a model to a folder: a path, a hub id, or the word `demo`.

Not a downloader of its own: the hub is reached through huggingface_hub, the demo checkpoint is built by `models.demo`.
No shapes; progress of the demo build is (stage, bytes done, bytes in all).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from .config import ConfigError
from .json_fields import show

# Subfolders (original weights, other formats) and consolidated copies are never needed.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
TOKENIZER_FILES = [name for name in HUB_FILES if name != "*.safetensors"]
HUB_IGNORED = ["*/*", "consolidated*", "*.index.json.bak"]
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
OnProgress = Callable[[str, int, int], None]


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    on_progress: OnProgress | None = None,
    what: str = "model",
) -> Path:
    """Return the folder of a model, fetching or building it when it is not there yet.

    Args:
        model: a folder, a hub id (`owner/name`), or `demo`.
        revision: branch, tag or commit on the hub.
        offline: take only what is in the cache; None asks HF_HUB_OFFLINE.
        on_progress: of building the demo.
        what: `model`, or `tokenizer` to fetch no weights; errors call it so.

    Raises:
        ConfigError: it is none of the three, or the hub cannot give it.
    """
    if not model or any(ord(c) < 32 for c in model):
        raise ConfigError(f"{what} = {show(model)} is not a folder, a hub id or the word demo")
    folder = Path(model).expanduser()
    is_hub_id = model != "demo" and not folder.is_dir()
    if revision is not None and not is_hub_id:
        raise ConfigError(f"revision = {show(revision)} only applies to a hub id, and {what} = {show(model)} is none")
    if model == "demo":
        from .demo import ensure_demo_checkpoint

        return ensure_demo_checkpoint(on_progress=on_progress)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{what} = {show(model)} is a file; give the folder that holds it")
    if _HUB_ID.fullmatch(model) is None or ".." in model or "--" in model:
        raise ConfigError(
            f"{what} = {show(model)}: there is no such folder, and it is no hub id (owner/name); check it"
        )
    if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ConfigError(f"revision = {show(revision)} is not the name of a branch, tag or commit")
    return _fetch(model, revision, is_offline() if offline is None else offline, what)


def is_offline() -> bool:
    """True when the environment forbids reaching the hub (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _fetch(model: str, revision: str | None, offline: bool, what: str) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ConfigError(
            f"{what} = {show(model)}: there is no such folder, and huggingface_hub is not installed to look for it; "
            "install it or give a folder"
        ) from None
    wanted = show(model) if revision is None else f"{show(model)} at revision {show(revision)}"
    try:
        path = snapshot_download(
            model,
            revision=revision,
            local_files_only=offline,
            allow_patterns=HUB_FILES if what == "model" else TOKENIZER_FILES,
            ignore_patterns=HUB_IGNORED,
        )
    except errors.RevisionNotFoundError:
        raise ConfigError(f"the hub has {show(model)} but not revision {show(revision)}; check revision") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"the hub gives {wanted} only to approved users; ask for access and log in (hf auth login)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{what} = {show(model)}: there is no such folder, and the hub has no such model (or it is private: log in "
            "with hf auth login); check the name"
        ) from None
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE forbids reaching the hub" if offline else "the hub cannot be reached"
        fix = "allow it" if offline else "check the network"
        raise ConfigError(
            f"{what} = {wanted}: there is no such folder, the cache lacks it or part of it, and {why}; "
            f"{fix} or give a folder"
        ) from None
    except Exception as error:  # whatever transport the hub's client uses, its user gets one line
        reason = show(f"{type(error).__name__}: {error}", 160)
        raise ConfigError(
            f"{what} = {wanted}: fetching it from the hub failed ({reason}); try again or give a folder"
        ) from None
    return Path(path)
