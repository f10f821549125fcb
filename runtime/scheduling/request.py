"""One request as the scheduler sees it, from arrival to its last token.

Not the wire form (runtime/messages.py) and not text: token ids in, token ids out.
Units: tokens; `arrival` and `first_scheduled` are seconds of the engine's monotonic clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np

from ..params import SamplingParams
from ..plan import PromptLogprobs, SamplingState, TokenLogprobs, unpack
from .token_log import LeftTokens, TokenLog


class RequestState(Enum):
    """Where a request is; every request moves down this list, and from RETURNING back to WAITING."""

    WAITING = "waiting"  # in the queue, holds nothing
    RUNNING = "running"  # has a slot and blocks of a rank
    RETURNING = "returning"  # was preempted; waits for the tokens of steps in flight
    LEAVING = "leaving"  # its last token is planned and its slot is free again; waits for the tokens in flight
    FINISHED = "finished"  # the scheduler has forgotten it


TOKEN_BYTES = 4


class Request(msgspec.Struct, eq=False, gc=False):
    """What was asked for and what became of it so far. (`gc=False`: thousands live, and none is part of a cycle.)

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: i32 [n], at least one.
        params: how to choose tokens and when to end.
        seed: of its random choices; `params.seed` or one drawn at arrival.
        priority: lower runs first under the `priority` policy.
        arrival: when it came; orders requests of equal priority, ties by `request_id`.
        max_length: total tokens at which it ends with `length`; set by `Scheduler.add`.
        state: see `RequestState`.
        sequence_id: its current (or last) sequence; -1 before the first admission.
        rank, slot: where that sequence runs (or ran).
        last_step: last step planned for that sequence before it lost its slot.
        first_scheduled: when its first step was planned; 0 before.
        num_preemptions: how often it lost its slot to others.
        awaits_mask: the mask of its next token has not come.
        num_prompt_logprobs: places of the prompt whose log-probabilities were reported.
        sampling: what a worker must know of `params`; set by `Scheduler.add`.
        mask: of its next token, in the form of `TokenMask.words`; None allows all.
        past: tokens applied so far as i32 bytes, but for those in `log` and behind them those in `late`.
        log, place: of its batch, or what it was left of that when it lost its slot, and its place there; or None, -1.
        late: tokens that came after it had lost its slot.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    arrival: float = 0.0
    max_length: int = 0
    state: RequestState = RequestState.WAITING
    sequence_id: int = -1
    rank: int = -1
    slot: int = -1
    last_step: int = -1
    first_scheduled: float = 0.0
    num_preemptions: int = 0
    awaits_mask: bool = False
    sampling: SamplingState | None = None
    mask: bytes | None = None
    num_prompt_logprobs: int = 0
    past: bytes = b""
    log: TokenLog | LeftTokens | None = None
    place: int = -1
    late: bytes = b""

    @property
    def generated(self) -> list[int]:
        """Tokens applied so far, a new list each time."""
        self.settle()
        tokens: list[int] = unpack(self.past).tolist()
        return tokens

    @property
    def num_generated(self) -> int:
        """How many those are."""
        self.settle()
        return len(self.past) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was generated."""
        if self.log is not None:
            self.settle()
        return len(self.prompt_token_ids) + len(self.past) // TOKEN_BYTES

    @property
    def constrained(self) -> bool:
        """True when it samples only with a mask of its own, one a token (see `Scheduler.release`)."""
        return self.params.structured is not None

    @property
    def is_plain(self) -> bool:
        """True when it is neither constrained nor ever judged."""
        return self.params.structured is None and self.params.prompt_logprobs is None

    @property
    def is_judged(self) -> bool:
        """True while log-probabilities of its prompt are still to be told."""
        asked = self.params.prompt_logprobs is not None
        return asked and self.num_prompt_logprobs + 1 < len(self.prompt_token_ids)

    @property
    def most_computed(self) -> int:
        """Tokens in KV when nothing is left to run: all but the last, and the prompt where nothing is generated."""
        most, prompt = self.max_length - 1, len(self.prompt_token_ids)
        return most if most > prompt else prompt

    def token_ids(self) -> np.ndarray:
        """Return all known tokens, i32 [num_tokens]."""
        return np.frombuffer(self.token_bytes(), np.int32)

    def token_bytes(self) -> bytes:
        """Return all known tokens in the form of `plan.pack`."""
        if self.log is not None:
            self.settle()
        return self.prompt_token_ids.tobytes() + self.past

    def append(self, tokens: Sequence[int]) -> None:
        """Take more tokens; if it has a slot, none that came before them may be in the log still."""
        if isinstance(self.log, LeftTokens):
            self.late += array("i", tokens).tobytes()
        else:
            self.past += array("i", tokens).tobytes()

    def settle(self) -> None:
        """Let `past` hold all tokens applied so far."""
        if isinstance(self.log, LeftTokens):
            self.past += self.log.of(self.place) + self.late
            self.log, self.place, self.late = None, -1, b""
        elif self.log is not None and self.log.is_behind(self.place):
            self.log.settle((self,))


class SequenceUpdate(msgspec.Struct, eq=False, gc=False):
    """What one applied step brought for one request. (`gc=False`: thousands a step, and none is part of a cycle.)

    Attributes:
        request: whose; `request.generated` holds the tokens already.
        token_ids: new tokens, in order.
        logprobs: one entry a new token, empty when not asked.
        prompt_logprobs: of places of the prompt, in order, each once; empty when not asked.
        finish_reason: None, `stop`, `length` or `error`; when set, the scheduler has forgotten the request.
        error: what went wrong when it is `error`.
    """

    request: Request
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
