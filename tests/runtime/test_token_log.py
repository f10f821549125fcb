"""The log of newest tokens loses none and mixes none up, whoever comes and goes while it turns around."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from moewe.runtime.scheduling.token_log import ROWS, LeftTokens, TokenLog


@dataclass
class Owner:
    place: int
    past: bytes = b""
    expected: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return np.frombuffer(self.past, np.int32).tolist()


@pytest.mark.parametrize("num_places", [1, 5, 64, 200, 64 * ROWS + 7])
def test_owners_get_what_came_to_their_place_while_they_held_it(num_places: int) -> None:
    rng = random.Random(num_places)
    log = TokenLog(num_places)
    owners: list[Owner | None] = [None] * num_places
    gone: list[Owner] = []
    left: list[tuple[LeftTokens, Owner]] = []
    few = rng.sample(range(num_places), min(num_places, 40))
    for step in range(3 * ROWS + 5):
        for place in few:
            if owners[place] is None and rng.random() < 0.3:
                owners[place] = Owner(place)
                log.begin(np.array([place]))
            elif owners[place] is not None and rng.random() < 0.01:
                if rng.random() < 0.5:
                    log.settle([owners[place]])
                else:
                    left.append((log.leave(np.array([place])), owners[place]))
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
        assert all(owner.tokens == owner.expected for owner in asked), step
    for tokens, owner in left:
        owner.past += tokens.of(0)
    still = [owner for owner in owners if owner is not None]
    log.settle(still)
    assert gone or num_places == 1
    assert all(owner.tokens == owner.expected for owner in still + gone)


def test_tokens_of_those_that_leave_together_are_told_apart() -> None:
    log, rng = TokenLog(50), random.Random(3)
    owners: list[Owner | None] = [Owner(place) for place in range(50)]
    for step in range(ROWS + 30):
        for place in range(50):
            if rng.random() < 0.02:  # another comes to the place
                owners[place] = Owner(place)
                log.begin(np.array([place]))
        places = np.array([place for place in range(50) if rng.random() < 0.7])
        log.write(places, (1000 * step + places).astype(np.int32), owners)
        for place in places.tolist():
            owners[place].expected.append(1000 * step + place)
    order = rng.sample(range(50), 50)
    left = log.leave(np.array(order))
    for _ in range(2 * ROWS):
        log.write(np.arange(50), np.zeros(50, np.int32), [None] * 50)
    for index in rng.sample(range(50), 50):
        owner = owners[order[index]]
        owner.past += left.of(index)
        assert owner.tokens == owner.expected
    newcomers = [Owner(place) for place in range(50)]
    log.begin(np.arange(50))
    assert log.leave(np.arange(50)).of(49) == b"" == newcomers[49].past


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
