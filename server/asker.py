"""Who asks: what tells the requests of one client from those of others, where work is shared out fairly.

Not a right to anything (server/http/keys.py). Set at the door, read wherever the request is worked on.
Units: none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address, ip_network

ASKER: ContextVar[str] = ContextVar("moewe_asker", default="")
# A client with IPv6 has as many addresses as it likes within such a network.
_IPV6_PREFIX = 64


def asker_of(headers: Sequence[tuple[bytes, bytes]], host: str, *, keyed: bool) -> str:
    """Return a name for who sends a request: by its API key where the server asks for one, else by its address.

    Args:
        headers: of the request.
        host: address it came from.
        keyed: the key was checked.
    """
    if keyed:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        return hashlib.sha256(given).hexdigest()
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return str(ip_network((address, _IPV6_PREFIX), strict=False)) if isinstance(address, IPv6Address) else host
