"""One safetensors file: its header, parsed and checked by our own code, and reads of byte ranges.

Not a tensor library: bytes go where the caller points. Files come from strangers: nothing in a header is trusted.
Units: bytes; offsets are absolute in the file.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ConfigError
from .json_fields import parse_object, show

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8
ITEMSIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
# Number formats that weights may be stored in where they are not quantised, and what `quant.FORMATS` calls them.
LOADABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: `num_bytes` from `offset` of `file`, row-major, `dtype` spelled as the format does."""

    name: str
    file: SafetensorsFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """An open file and what its header says.

    Args:
        path: a regular file.

    Raises:
        ConfigError: it is not a whole and consistent safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        try:
            # Non-blocking, so that a pipe under a weight file's name is refused below and cannot hang the open.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._refuse(f"cannot be opened: {error.strerror}; check its rights") from None
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on; safe from several threads at once."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._refuse(f"cannot be read: {error.strerror}; check the disk and copy it again") from None
            if count == 0:
                raise self._refuse("ended early: it changed while it was read; start again")
            done += count

    def check_unchanged(self) -> None:
        """Raise ConfigError where the file has been written to since it was opened."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise self._refuse("was changed while it was in use; start again")

    def close(self) -> None:
        """Close the file; allowed more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _parse(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._refuse("is not a regular file; give a model folder as transformers saves it")
        if status.st_size < 8:
            raise self._refuse(f"has {status.st_size} bytes and no header: an incomplete download? fetch it again")
        self._stamp = (status.st_size, status.st_mtime_ns)
        length = int.from_bytes(self._bytes(8, 0), "little")
        if length > MAX_HEADER_BYTES or 8 + length > status.st_size:
            why = f"claims a header of {length} bytes in a file of {status.st_size}: incomplete or not safetensors"
            raise self._refuse(f"{why}; fetch it again")
        self.header_bytes = 8 + length
        header = parse_object(self._bytes(length, 8), f"header of {show(self.path.name)}")
        header.pop("__metadata__", None)
        entries = sorted(
            (self._entry(name, value) for name, value in header.items()), key=lambda e: (e.offset, e.num_bytes)
        )
        end = self.header_bytes
        for entry in entries:
            if entry.offset != end:
                raise self._refuse(f"leaves a gap or overlap before tensor {show(entry.name)}: damaged; fetch it again")
            end += entry.num_bytes
        if end != status.st_size:
            why = f"has {status.st_size} bytes where its header describes {end}: an incomplete download?"
            raise self._refuse(f"{why} fetch it again")
        self.tensors = {entry.name: entry for entry in entries}

    def _entry(self, name: str, value: Any) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            well_typed = all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)) and dtype in ITEMSIZES
        except (TypeError, KeyError, ValueError):
            well_typed = False
        if not well_typed or len(shape) > MAX_DIMS:
            raise self._refuse(f"describes tensor {show(name)} as {show(value)}, which is not valid: fetch it again")
        num_bytes = math.prod(shape) * ITEMSIZES[dtype]
        if end - begin != num_bytes:
            why = f"gives tensor {show(name)} {end - begin} bytes where {dtype} {list(shape)} takes {num_bytes}"
            raise self._refuse(f"{why}: damaged; fetch it again")
        return StoredTensor(
            name=name, file=self, dtype=dtype, shape=shape, offset=self.header_bytes + begin, num_bytes=num_bytes
        )

    def _bytes(self, length: int, offset: int) -> bytes:
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError(f"weight file {show(self.path.name)} {why}")
