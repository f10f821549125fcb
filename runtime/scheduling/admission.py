"""Who may come in: what is refused at the door, the queue of those who wait, and which rank takes the next one.

Not planning of a running batch (runtime/scheduler.py). A refusal is one line with the numbers and the fix.
Units: tokens, blocks.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .limits import SchedulerConfig
from .policy import Precedence, precedence
from .request import Request


class AdmissionError(ValueError):
    """A request that cannot be taken; the text names what was asked, what there is, and the fix."""


class QueueFullError(AdmissionError):
    """A request that could be taken later: too many wait already."""


def check_fits(prompt: int, asked: int | None, config: SchedulerConfig) -> int:
    """Return the total length at which a request ends; raise AdmissionError if it could never run to there.

    Args:
        prompt: tokens of its prompt.
        asked: its `max_tokens`; without them it may fill the context, or the whole pool of a rank if that is less.
        config: the limits.
    """
    if prompt < 1:
        raise AdmissionError("prompt has 0 tokens; send at least 1")
    if prompt >= config.max_model_len:
        raise AdmissionError(
            f"prompt has {prompt} tokens, but max_model_len is {config.max_model_len}, output included; "
            f"shorten the prompt to at most {config.max_model_len - 1} tokens"
        )
    if asked is not None and prompt + asked > config.max_model_len:
        raise AdmissionError(
            f"prompt of {prompt} tokens and max_tokens={asked} make {prompt + asked}, but max_model_len is "
            f"{config.max_model_len}; lower max_tokens to at most {config.max_model_len - prompt}"
        )
    most = config.most_length
    length = most if asked is None else prompt + asked
    if max(length, prompt + 1) > most:
        room = most - prompt
        fix = f"lower max_tokens to at most {room}" if room > 0 else f"shorten the prompt to at most {most - 1} tokens"
        raise AdmissionError(
            f"prompt of {prompt} tokens and max_tokens={asked} need {_shortage(max(length - 1, prompt), config)}; "
            f"{fix}, or give the server more KV memory"
        )
    return length


def _shortage(num_tokens: int, config: SchedulerConfig) -> str:
    """Say what `num_tokens` tokens in KV need of the cache group that holds the fewest, and what there is."""
    group = min(config.groups, key=config.group_capacity)
    need = config.group_needs(num_tokens)[config.groups.index(group)]
    where = f" for each {group.kind} of {group.window} tokens" if group.is_windowed else ""
    return (
        f"{need} KV blocks of {config.block_size} tokens{where}, but a rank has {group.num_blocks} "
        f"({group.num_blocks * config.block_size} tokens, none reserved)"
    )


class WaitingQueue:
    """Requests in order of precedence, each at most once."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._keys: list[Precedence] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Add `request` at its place."""
        key = precedence(request, self._policy)
        if not self._keys or self._keys[-1] < key:  # nearly all of them
            self._keys.append(key)
            self._requests.append(request)
            return
        at = bisect.bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)

    def first(self, most: int) -> list[Request]:
        """Return the next requests to be served, `most` of them or all."""
        return self._requests[:most]

    def drop(self, number: int) -> None:
        """Take out the next `number` requests to be served."""
        del self._keys[:number], self._requests[:number]

    def remove(self, request: Request) -> None:
        """Take `request` out, wherever it stands."""
        at = bisect.bisect_left(self._keys, precedence(request, self._policy))
        assert self._requests[at] is request, f"{request.request_id} is not in the queue"
        del self._keys[at], self._requests[at]

    def check_invariants(self) -> None:
        """Raise AssertionError unless the queue is strictly ordered and agrees with its requests."""
        keys = [precedence(request, self._policy) for request in self._requests]
        assert keys == self._keys, "a key does not belong to its request"
        assert all(a < b for a, b in itertools.pairwise(keys)), "the queue is out of order"


@dataclass
class RankLoads:
    """What each of W ranks could still take in this step; plain numbers, as one request after another is placed.

    G cache groups; blocks of a sequence are those that it holds between steps (a windowed group keeps few of them).

    Attributes:
        free_slots: [W] slots without a sequence; 0 for a rank that must not admit in this step.
        spare_blocks: [W][G] free blocks, less what running prompts will still need and what decodes need in this step.
        num_sequences: [W] sequences that run.
        worst_blocks: [W][G] blocks that they hold if all run to their full length.
        token_work: [W] tokens that they still have to run.
        num_blocks: [G] blocks of a rank.
    """

    free_slots: list[int]
    spare_blocks: list[list[int]]
    num_sequences: list[int]
    worst_blocks: list[list[int]]
    token_work: list[int]
    num_blocks: list[int]

    def __post_init__(self) -> None:
        self._open = [(self.token_work[rank], rank) for rank, free in enumerate(self.free_slots) if free > 0]
        heapq.heapify(self._open)

    def place(self, *, prompt_blocks: Sequence[int], worst_blocks: Sequence[int], token_work: int) -> int:
        """Book a sequence on the rank with the least token work that has room (ties: the lowest); -1 if none has.

        A rank has room if in every group ([G] blocks of the new one) all its sequences could run to their full length,
        or else if, after the prompt, a spare block for each sequence is left: so an admission is not answered with a
        preemption a few steps later.
        """
        ranks = self._open
        passed = []
        while ranks and not self._has_room(ranks[0][1], prompt_blocks, worst_blocks):
            passed.append(heapq.heappop(ranks))
        rank = -1
        if ranks:
            work, rank = ranks[0]
            self.num_sequences[rank] += 1
            spare, worst = self.spare_blocks[rank], self.worst_blocks[rank]
            for group, most in enumerate(worst_blocks):
                spare[group] -= prompt_blocks[group]
                worst[group] += most
            self.token_work[rank] = work = work + token_work
            self.free_slots[rank] = free = self.free_slots[rank] - 1
            if free:
                heapq.heapreplace(ranks, (work, rank))
            else:
                heapq.heappop(ranks)
        for other in passed:
            heapq.heappush(ranks, other)
        return rank

    def fit_all(self, worst_blocks: Sequence[int]) -> bool:
        """Tell whether sequences that hold [G] `worst_blocks` together never run short, wherever they go."""
        open_ranks = [self.worst_blocks[rank] for _, rank in self._open]
        return all(
            max(held) + more <= most for held, more, most in zip(zip(*open_ranks), worst_blocks, self.num_blocks)
        )

    def place_all(self, token_work: Sequence[int]) -> list[int]:
        """Return what `place` would of sequences with such work, one after another; they must fit (`fit_all`).

        Blocks are not booked: nothing can be placed after them. There must be a free slot for each.
        """
        ranks, free_slots, chosen = self._open, self.free_slots, []
        for more in token_work:
            work, rank = ranks[0]
            chosen.append(rank)
            free_slots[rank] -= 1
            if free_slots[rank]:
                heapq.heapreplace(ranks, (work + more, rank))
            else:
                heapq.heappop(ranks)
        return chosen

    def _has_room(self, rank: int, prompt_blocks: Sequence[int], worst_blocks: Sequence[int]) -> bool:
        worst = self.worst_blocks[rank]
        for group, most in enumerate(self.num_blocks):
            could_run_short = worst[group] + worst_blocks[group] > most
            if could_run_short and self.spare_blocks[rank][group] - prompt_blocks[group] <= self.num_sequences[rank]:
                return False
        return True
