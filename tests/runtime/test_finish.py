"""Where sequences end: one rule for one token a step and for many, against a loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.runtime.plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from moewe.runtime.ranks import sampler_reference
from moewe.runtime.ranks.finish import NO_TOKEN, commit_tokens

REASONS = {FINISH_NONE: "", FINISH_STOP: "stop", FINISH_LENGTH: "length"}
SEQUENCE = st.tuples(
    st.lists(st.integers(0, 6), max_size=5),
    st.integers(1, 9),
    st.integers(0, 6),
    st.lists(st.integers(0, 6), max_size=3),
)


def padded(lists: list[list[int]], width: int) -> np.ndarray:
    return np.array([[*own, *[NO_TOKEN] * (width - len(own))] for own in lists], np.int64).reshape(len(lists), width)


@settings(max_examples=300, deadline=None)
@given(st.lists(SEQUENCE, max_size=5), st.sampled_from([1, 5]))
def test_what_is_kept_equals_a_loop(sequences: list[tuple[list[int], int, int, list[int]]], most_tokens: int) -> None:
    sequences = [(own[:most_tokens], *rest) for own, *rest in sequences]
    tokens = padded([own for own, *_ in sequences], most_tokens)
    lengths = np.array([length for _, length, *_ in sequences], np.int64)
    most = lengths + np.array([room for *_, room, _ in sequences], np.int64)
    found = commit_tokens(tokens, lengths, most, padded([ends for *_, ends in sequences], 3))
    for row, (own, length, room, ends) in enumerate(sequences):
        wanted = sampler_reference.keep(own, length, length + room, ends)
        assert (int(found.counts[row]), REASONS[int(found.flags[row])]) == wanted


def test_an_end_token_in_the_last_place_is_an_end_and_no_room_takes_nothing() -> None:
    tokens, ends = np.array([[9], [9], [9]]), np.array([[9], [8], [9]])
    found = commit_tokens(tokens, np.array([4, 4, 4]), np.array([5, 5, 4]), ends)
    assert found.counts.tolist() == [1, 1, 0]
    assert found.flags.tolist() == [FINISH_STOP, FINISH_LENGTH, FINISH_LENGTH]
