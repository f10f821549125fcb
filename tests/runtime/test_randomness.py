"""Counter-based randomness: known answers, equality with the plain form, and statistics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from moewe.runtime.ranks import sampler_reference
from moewe.runtime.ranks.randomness import philox, uniform

# The three vectors published with Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, 2**32 - 1)


def as_words(values):
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, answer):
    words = philox(as_words(counter), as_words(key))
    assert tuple(int(word[0]) for word in words) == answer
    assert sampler_reference.philox(counter, key) == answer


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_philox_equals_plain_integers(counter, key):
    words = philox(as_words(counter), as_words(key))
    assert tuple(int(word[0]) for word in words) == sampler_reference.philox(counter, key)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_uniform_does_not_depend_on_the_other_rows(rows):
    seed = np.array([row[0] for row in rows], np.uint64)
    position = np.array([row[1] for row in rows], np.int64)
    together = uniform(seed, position)
    alone = [uniform(seed[i : i + 1], position[i : i + 1])[0] for i in range(len(rows))]
    assert together.tolist() == alone
    assert (together >= 0).all()
    assert (together < 1).all()


@pytest.mark.parametrize("which", ["seeds", "positions", "draws"])
def test_uniform_is_uniform_along_each_axis(which):
    num = 20_000
    count, zeros = np.arange(num), np.zeros(num, np.int64)
    if which == "seeds":
        values = uniform(count.astype(np.uint64), zeros)
    elif which == "positions":
        values = uniform(zeros.astype(np.uint64), count)
    else:
        values = np.array([uniform(np.zeros(1, np.uint64), np.zeros(1, np.int64), draw)[0] for draw in range(2000)])
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(values[:-1], values[1:], bins=8)[0].ravel()
    assert stats.chisquare(pairs).pvalue > 1e-3  # neighbours are independent
