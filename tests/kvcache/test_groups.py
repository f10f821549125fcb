"""Cache groups: what a row sees, one at a time or many at once, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.attention.reference import first_seen
from moewe.kvcache.groups import KINDS, CacheGroup, first_visible, first_visible_rows
from moewe.quant import FORMATS
from moewe.topologies.kv_sizes import WINDOWED


def group(**changes) -> CacheGroup:
    fields = dict(
        name="g", kind="full", layers=(0, 1), num_kv_heads=2, head_dim=8, value_dim=6, number_format=FORMATS["bfloat16"]
    )
    return CacheGroup(**(fields | changes))


@given(kind=st.sampled_from(KINDS), window=st.integers(1, 40), position=st.integers(0, 120))
def test_first_visible_is_what_trying_finds(kind: str, window: int, position: int) -> None:
    window = window if kind in WINDOWED else 0
    first = first_visible(kind, window, position)
    assert first == first_seen(kind, window, position)
    assert first <= first_visible(kind, window, position + 1) <= position + 1


@given(kind=st.sampled_from(KINDS), window=st.integers(1, 40), positions=st.lists(st.integers(0, 1 << 40)))
def test_rows_together_see_what_they_see_alone(kind: str, window: int, positions: list[int]) -> None:
    rows = first_visible_rows(kind, window, np.array(positions, np.int64))
    assert rows.dtype == np.int64
    assert rows.tolist() == [first_visible(kind, window, position) for position in positions]


def test_bytes_of_keys_and_values_of_different_widths() -> None:
    assert group().bytes_per_token() == 2 * 2 * (8 + 6) * 2
    assert group(kind="latent", num_kv_heads=1).bytes_per_token() == 2 * 8 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "slide"}, "kind 'slide'; use one of full, window, chunk, latent"),
        ({"kind": "window"}, "kind 'window' has window=0"),
        ({"window": 4}, "kind 'full' has window=4"),
        ({"kind": "latent", "window": 4}, "kind 'latent' has window=4"),
    ],
)
def test_groups_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(**changes)
