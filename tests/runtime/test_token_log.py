"""The log of newest tokens loses none and mixes none up, whoever comes and goes while it turns around."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import numpy as np
import pytest

from moewe.runtime.scheduling.token_log import ROWS, TokenLog


@dataclass
class Owner:
    place: int
    past: array = field(default_factory=lambda: array("i"))
    expected: list[int] = field(default_factory=list)


@pytest.mark.parametrize("num_places", [1, 5, 64, 200, 64 * ROWS + 7])
def test_owners_get_what_came_to_their_place_while_they_held_it(num_places: int) -> None:
    rng = random.Random(num_places)
    log = TokenLog(num_places)
    owners: list[Owner | None] = [None] * num_places
    gone: list[Owner] = []
    few = rng.sample(range(num_places), min(num_places, 40))
    for step in range(3 * ROWS + 5):
        for place in few:
            if owners[place] is None and rng.random() < 0.3:
                owners[place] = Owner(place)
                log.begin(np.array([place]))
            elif owners[place] is not None and rng.random() < 0.01:
                log.settle([owners[place]])
                gone.append(owners[place])
                owners[place] = None
        running = [owners[place] for place in few if owners[place] is not None and rng.random() < 0.8]
        tokens = [rng.randrange(1000) for _ in running]
        for owner, token in zip(running, tokens):
            owner.expected.append(token)
        log.write(np.array([owner.place for owner in running], np.int64), np.array(tokens, np.int32), owners)
        log.check_invariants(owners)
        asked = [owner for owner in running if rng.random() < 0.02]
        log.settle(asked)
        assert all(owner.past.tolist() == owner.expected for owner in asked), step
    left = [owner for owner in owners if owner is not None]
    log.settle(left)
    assert gone or num_places == 1
    assert all(owner.past.tolist() == owner.expected for owner in left + gone)


def test_a_step_settles_few_places_and_all_have_their_turn() -> None:
    log = TokenLog(64 * ROWS)
    owners: list[Owner | None] = [Owner(place) for place in range(64 * ROWS)]
    everywhere = np.arange(64 * ROWS)
    settled = []
    for step in range(ROWS):
        before = [len(owner.past) for owner in owners]
        log.write(everywhere, np.full(64 * ROWS, step, np.int32), owners)
        settled.append(sum(len(owner.past) > had for owner, had in zip(owners, before)))
    assert settled == [64] * ROWS
