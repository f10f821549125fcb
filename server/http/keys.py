"""API keys: where they come from, what a key may be, and whether a request carries one of them.

Not the door (server/http/guard.py). Keys are shown nowhere: messages name the flag, the file and the line, never the
key.
Units: characters; a key is visible ASCII.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import MutableMapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

KEY_VARIABLE = "MOEWE_API_KEY"
MOST_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[\x21-\x7e]{1,4096}")


def gather_keys(
    flags: Sequence[str], file: str | None, environment: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the keys of a server: those of flags and file together, or where neither is given, of the environment.

    The variable is taken out of the environment, so that no process that is started later inherits the key.

    Raises:
        ValueError: a key that no header can carry, an empty one, or a file that cannot be read.
    """
    variable = environment.pop(KEY_VARIABLE, None)
    if flags:
        log.warning("--api-key shows in the list of processes; --api-key-file or %s do not", KEY_VARIABLE)
    keys = [_checked(key, "--api-key") for key in flags]
    if file is not None:
        keys += _read(Path(file))
    if not flags and file is None and variable is not None:
        keys.append(_checked(variable, KEY_VARIABLE))
    return tuple(dict.fromkeys(keys))


class KeyCheck:
    """Says whether a request carries one of the keys, in a time that does not depend on how much of it is right.

    Args:
        keys: any of them lets a request in; none at all asks nothing.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def asks(self) -> bool:
        """True when a key is wanted."""
        return bool(self._digests)

    def accepts(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Return True when exactly one `Authorization: Bearer KEY` is there and its key is one of ours."""
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest, right = _digest(key.strip(b" ")), False
        for known in self._digests:  # all of them, whichever fits
            right |= hmac.compare_digest(digest, known)
        return right and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key: comparing digests tells nothing about the length of ours."""
    return hashlib.sha256(key).digest()


def _checked(key: str, where: str) -> str:
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"{where} is not a key; use 1 to 4096 visible ASCII characters without spaces")
    return key


def _read(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"--api-key-file {str(path)!r} cannot be read: {error.strerror}; check path and rights"
        ) from None
    if len(data) > MOST_FILE_BYTES:
        raise ValueError(f"--api-key-file {str(path)!r} is larger than {MOST_FILE_BYTES} bytes; give a file of keys")
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        log.warning("the file of API keys %s is open to other users of this machine; chmod 600 closes it", path)
    lines = enumerate(data.decode("utf-8", "replace").splitlines(), 1)
    keys = [
        _checked(line.strip(), f"line {number} of --api-key-file {str(path)!r}")
        for number, line in lines
        if line.strip() and not line.strip().startswith("#")
    ]
    if not keys:
        raise ValueError(f"--api-key-file {str(path)!r} holds no key; write one key a line")
    return keys
