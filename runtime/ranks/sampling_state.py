"""How each slot's next token is to be chosen, and what of it the worker reports: the sampling part of a running batch.

Not a sampler: it hands out rows of settings and edits. A batch in which nobody asks for more than filters costs one
look at a flag a step.
Shapes: S slots, K rows to sample, E most end tokens of any request.
"""

from __future__ import annotations

import numpy as np

from ..plan import Admission, unpack
from .banned import BadWords
from .finish import NO_TOKEN
from .logit_edits import LogitEdits
from .penalties import PenaltyTable
from .sampler import SamplingRows

# Below this a softmax would overflow long before sampling could differ from the argmax.
GREEDY_TEMPERATURE = 1e-2


class SlotSampling:
    """Settings by slot; those of a free slot mean nothing.

    Args:
        num_slots: S.

    Attributes:
        ends: [S, E] i64, end tokens, NO_TOKEN behind the last.
        num_logprobs: [S] i64, alternatives to report, -1 for none at all.
        num_prompt_logprobs: [S] i64, the same for the prompt.
        prompt_from, prompt_end: [S] i64, first place of the prompt to report, and the place behind its last.
        edits_logits: [S] bool, it asks for more than filters.
    """

    def __init__(self, num_slots: int) -> None:
        self.greedy = np.zeros(num_slots, np.bool_)
        self.temperature = np.ones(num_slots, np.float64)
        self.top_p = np.ones(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.ends = np.full((num_slots, 1), NO_TOKEN, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int64)
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int64)
        self.prompt_from = np.ones(num_slots, np.int64)
        self.prompt_end = np.zeros(num_slots, np.int64)
        self.edits_logits = np.zeros(num_slots, np.bool_)
        self._min_length = np.zeros(num_slots, np.int64)  # total tokens before which no end token may come
        self._penalties = np.array([[1.0], [0.0], [0.0]], np.float32).repeat(num_slots, 1)  # repetition, frequency, ..
        self._seen = PenaltyTable(num_slots)
        self._bad_words = BadWords(num_slots)
        self._bias_slot = np.zeros(0, np.int64)
        self._bias_ids = np.zeros(0, np.int64)
        self._bias_values = np.zeros(0, np.float32)

    def admit(self, admission: Admission) -> None:
        """Take over the settings of a sequence, and count the tokens that it has."""
        slot, asked, tokens = admission.slot, admission.sampling, unpack(admission.tokens)
        num_prompt = tokens.size if admission.num_prompt_tokens < 0 else admission.num_prompt_tokens
        self.greedy[slot] = asked.temperature < GREEDY_TEMPERATURE or asked.top_k == 1
        self.temperature[slot] = asked.temperature
        self.top_p[slot] = asked.top_p
        self.top_k[slot] = asked.top_k
        self.min_p[slot] = asked.min_p
        self.seed[slot] = asked.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.num_logprobs[slot] = asked.num_logprobs
        self.num_prompt_logprobs[slot] = asked.num_prompt_logprobs
        self.prompt_from[slot] = admission.prompt_logprobs_from
        self.prompt_end[slot] = num_prompt if asked.num_prompt_logprobs >= 0 else 0
        ends = np.asarray(asked.eos_token_ids, np.int64)
        wider = max(0, ends.size - self.ends.shape[1])
        if wider:
            self.ends = np.pad(self.ends, ((0, 0), (0, wider)), constant_values=NO_TOKEN)
        self.ends[slot] = NO_TOKEN
        self.ends[slot, : ends.size] = ends
        self._min_length[slot] = num_prompt + asked.min_tokens
        penalties = (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)
        self._penalties[:, slot] = penalties
        if penalties != (1.0, 0.0, 0.0):
            prompt = tokens[:num_prompt] if asked.repetition_penalty != 1.0 else tokens[:0]
            self._seen.admit(slot, prompt, tokens[num_prompt:])
        if asked.bad_words:
            self._bad_words.admit(slot, asked.bad_words, tokens[num_prompt:])
        if asked.logit_bias:
            added = len(asked.logit_bias)
            self._bias_slot = np.concatenate([self._bias_slot, np.full(added, slot)])
            self._bias_ids = np.concatenate([self._bias_ids, np.fromiter(asked.logit_bias, np.int64, added)])
            values = np.fromiter(asked.logit_bias.values(), np.float32, added)
            self._bias_values = np.concatenate([self._bias_values, values])
        self.edits_logits[slot] = bool(
            penalties != (1.0, 0.0, 0.0) or asked.bad_words or asked.logit_bias or (asked.min_tokens and ends.size)
        )

    def release(self, slots: np.ndarray) -> None:
        """Forget the sequences of `slots`."""
        self.prompt_end[slots] = 0
        if not self.edits_logits[slots].any():
            return
        self.edits_logits[slots] = False
        self._seen.release(slots)
        self._bad_words.release(slots)
        kept = ~np.isin(self._bias_slot, slots)
        self._bias_slot, self._bias_ids = self._bias_slot[kept], self._bias_ids[kept]
        self._bias_values = self._bias_values[kept]

    def takes_best(self, slots: np.ndarray) -> bool:
        """Tell whether all of `slots` want the most likely token, of logits as they are, and nothing reported of it."""
        asks_more = ~self.greedy[slots] | self.edits_logits[slots] | (self.num_logprobs[slots] >= 0)
        return not asks_more.any()

    def rows(self, slots: np.ndarray, positions: np.ndarray) -> SamplingRows:
        """Return how the token at `positions` of each of `slots` is chosen, [K] each."""
        return SamplingRows(
            greedy=self.greedy[slots],
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            seed=self.seed[slots],
            position=positions,
        )

    def edits(self, slots: np.ndarray, positions: np.ndarray) -> LogitEdits | None:
        """Return what `slots` do to their logits, masks aside, when they choose at `positions`; None for nothing."""
        if not self.edits_logits[slots].any():
            return None
        row, seen, times = self._seen.entries(slots)
        ends = self.ends[slots]
        early = positions < self._min_length[slots]
        end_row, end_place = np.nonzero((ends != NO_TOKEN) & early[:, None])
        word_row, word_token = self._bad_words.entries(slots)
        place = np.full(len(self.greedy), -1, np.int64)
        place[slots] = np.arange(slots.size)
        biased = place[self._bias_slot]
        present = biased >= 0
        repetition, frequency, presence = self._penalties[:, slots]
        return LogitEdits(
            bias=(biased[present], self._bias_ids[present]),
            bias_values=self._bias_values[present],
            seen=(row, seen),
            times=times,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            banned=(np.concatenate([end_row, word_row]), np.concatenate([ends[end_row, end_place], word_token])),
        )

    def note(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Count the tokens that sequences keep: the first `counts` [K] of `tokens` [K, Q] in each of `slots` [K]."""
        if not self.edits_logits[slots].any():
            return
        for place in range(tokens.shape[1]):
            kept = counts > place
            self._seen.note(slots[kept], tokens[kept, place])
            self._bad_words.note(slots[kept], tokens[kept, place])
