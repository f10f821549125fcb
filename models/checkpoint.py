"""The weight files of a model folder: which ones count, and every tensor in them.

Not loading and no tensor names of a family: `loading` decides what to read and where to put it.
Units: bytes. Only plain safetensors files inside the folder are ever opened; pickled files never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .config import ConfigError
from .json_fields import read_object, show, show_path
from .safetensors_file import LOADABLE, SafetensorsFile, StoredTensor

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt")
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Which files of a folder hold the weights.

    Attributes:
        files: names of the files to open, in order.
        weight_map: tensor name -> file name, as the index says; None without an index.
        strays: other weight files in the folder, which are never opened.
    """

    files: tuple[str, ...]
    weight_map: dict[str, str] | None
    strays: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The open weight files of a folder.

    Attributes:
        tensors: by name.
        strays: weight files beside them that were left alone.
        header_bytes: bytes read to get here.
    """

    tensors: dict[str, StoredTensor]
    strays: tuple[str, ...]
    header_bytes: int


def find_shards(folder: Path) -> Shards:
    """Return the weight files of `folder`: those that its index names, else `model.safetensors`.

    Raises:
        ConfigError: a file that the index names is absent or has a name that is not plain, or there are no safetensors.
    """
    try:
        present = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot list {show_path(folder)}: {error.strerror}; give a model folder") from None
    weights = [name for name in present if name.endswith(_WEIGHT_SUFFIXES)]
    if INDEX_FILE in present:
        weight_map = _read_index(folder)
        files = tuple(dict.fromkeys(weight_map.values()))
        absent = [name for name in files if not (folder / name).exists()]
        if absent:
            raise ConfigError(
                f"{INDEX_FILE} names weight files that are absent: {_some(absent)}; an incomplete download? fetch again"
            )
        return Shards(files=files, weight_map=weight_map, strays=tuple(n for n in weights if n not in files))
    if SINGLE_FILE in present:
        return Shards(files=(SINGLE_FILE,), weight_map=None, strays=tuple(n for n in weights if n != SINGLE_FILE))
    raise _nothing_to_open(folder, weights)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open the weight files of `folder` for the time of a `with` block."""
    shards = find_shards(folder)
    files: list[SafetensorsFile] = []
    try:
        tensors: dict[str, StoredTensor] = {}
        for name in shards.files:
            files.append(SafetensorsFile(folder / name))
            tensors |= _listed_tensors(files[-1], name, shards.weight_map)
        if shards.weight_map is not None:
            absent = [f"{tensor} (in {file})" for tensor, file in shards.weight_map.items() if tensor not in tensors]
            if absent:
                raise ConfigError(
                    f"weight files lack tensors that {INDEX_FILE} lists: {_some(absent)}; fetch them again"
                )
        yield Checkpoint(tensors=tensors, strays=shards.strays, header_bytes=sum(file.header_bytes for file in files))
    finally:
        for file in files:
            file.close()


def stored_format(folder: Path) -> str | None:
    """Return the number format of the embedding in the weight files of `folder`, None where it cannot be told.

    What is wrong with the files is no matter here: it is told when they are read.
    """
    try:
        shards = find_shards(folder)
        placed = [file for name, file in (shards.weight_map or {}).items() if name.endswith(_EMBEDDING)]
        for name in dict.fromkeys(placed or shards.files[:1]):
            file = SafetensorsFile(folder / name)
            file.close()
            for tensor in file.tensors.values():
                if tensor.name.endswith(_EMBEDDING) and tensor.dtype in LOADABLE:
                    return LOADABLE[tensor.dtype]
    except ConfigError:
        pass
    return None


def _listed_tensors(file: SafetensorsFile, name: str, weight_map: dict[str, str] | None) -> dict[str, StoredTensor]:
    if weight_map is None:
        return file.tensors
    extra = [tensor for tensor in file.tensors if weight_map.get(tensor) != name]
    if extra:
        raise ConfigError(
            f"{show(name)} holds tensors that {INDEX_FILE} does not place there: {_some(extra)}; "
            "fetch the index and the weights again"
        )
    return file.tensors


def _read_index(folder: Path) -> dict[str, str]:
    weight_map = read_object(folder / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{INDEX_FILE}: weight_map = {show(weight_map)} must list tensors and files; fetch it again")
    for tensor, name in weight_map.items():
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            why = "is not the plain name of a .safetensors file in the folder; fetch the index again"
            raise ConfigError(f"{INDEX_FILE}: {show(tensor)} = {show(name)} {why}")
    return weight_map


def is_plain_name(name: object) -> bool:
    """True when `name` can only be a file directly inside its folder."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and not any(c in "/\\" or ord(c) < 32 for c in name)
    )


def _nothing_to_open(folder: Path, weights: list[str]) -> ConfigError:
    where = show_path(folder)
    if any(name.endswith(".safetensors") for name in weights):
        return ConfigError(
            f"{where} holds {_some(weights)} but neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "an incomplete download? fetch the index"
        )
    if any(name.endswith(_PICKLED_SUFFIXES) for name in weights):
        return ConfigError(
            f"{where} holds only pickled weights ({_some(weights)}), which can run code and are never opened; "
            "convert them with transformers: AutoModelForCausalLM.from_pretrained(IN).save_pretrained(OUT)"
        )
    held = f"only {_some(weights)}" if weights else "no weights"
    return ConfigError(
        f"{where} holds {held}; moewe reads {SINGLE_FILE} or {INDEX_FILE} with its files (or use --load-format dummy)"
    )


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(show(name) for name in names[:limit]) + more
