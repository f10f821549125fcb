"""Waiting for what replicas say: deltas of requests until enough of them have ended.

Not a client: it polls a `ReplicaSet` in the test's own thread. Units: seconds.
"""

from __future__ import annotations

import time

from moewe.runtime.replicas import ReplicaSet


def finish(replicas: ReplicaSet, count: int, seconds: float = 60) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Poll until `count` requests have ended; return token ids and reason by request."""
    told: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < count:
        assert time.monotonic() < deadline, f"only {ended} ended"
        for delta in replicas.poll(0.5):
            assert delta.request_id not in ended, "a delta after the last one"
            told.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta.finish_reason
    return told, ended
