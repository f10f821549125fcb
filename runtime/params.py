"""How one request wants its tokens chosen and when to end: `SamplingParams`.

Not the sampler (runtime/ranks/sampler.py) and not a wire format (server/protocol.py): one object for both doors.
Units: tokens; probabilities in [0, 1]; temperature 0 means greedy.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
STRUCTURED_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Below this a softmax would overflow long before sampling could differ from the argmax.
GREEDY_TEMPERATURE = 1e-2
# What a request is taken to generate when work is weighed: most end long before their limit does.
EXPECTED_OUTPUT_TOKENS = 256


class StructuredSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text must look like.

    Attributes:
        kind: one of `STRUCTURED_KINDS`.
        text: the JSON schema, the regular expression, the choices as a JSON list, or the grammar; empty for json_object.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in STRUCTURED_KINDS:
            raise ValueError(f"kind={self.kind!r} is not allowed; use one of {', '.join(STRUCTURED_KINDS)}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to generate for one prompt. Invalid values raise ValueError that names field, value and fix.

    Attributes:
        max_tokens: most tokens to generate; None means until the context is full.
        temperature: 0 is greedy; else logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 or -1 keep all.
        seed: fixes the random choices whatever else runs; None draws one at admission.
        stop: strings at whose first appearance generation ends; they are not part of the text.
        ignore_eos: go on past end-of-sequence tokens.
        logprobs: None, or how many alternatives to report beside each chosen token (0..20).
        structured: what the text must look like; None leaves it free.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    structured: StructuredSpec | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif self.stop is None or isinstance(self.stop, list):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop or ()))
        for field, value, fine, fix in self._checks():
            if not fine:
                raise ValueError(f"{field}={value!r} is not allowed; {fix}")

    def _checks(self) -> list[tuple[str, Any, bool, str]]:
        def is_int(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def is_number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        stops = self.stop
        return [
            ("max_tokens", self.max_tokens,
             self.max_tokens is None or (is_int(self.max_tokens) and self.max_tokens > 0),
             "use an integer of at least 1"),
            ("temperature", self.temperature, is_number(self.temperature) and 0 <= self.temperature <= 100,
             "use a number from 0 (greedy) to 100"),
            ("top_p", self.top_p, is_number(self.top_p) and 0 < self.top_p <= 1, "use a number above 0 and up to 1"),
            ("top_k", self.top_k, is_int(self.top_k) and self.top_k >= -1,
             "use 0 or -1 to keep all tokens, or a positive integer"),
            ("seed", self.seed, self.seed is None or (is_int(self.seed) and -(2**63) <= self.seed < 2**63),
             "use an integer of at most 64 bits"),
            ("stop", stops, isinstance(stops, tuple) and len(stops) <= MAX_STOP_STRINGS
             and all(isinstance(s, str) and s for s in stops),
             f"use up to {MAX_STOP_STRINGS} strings, none empty"),
            ("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "use true or false"),
            ("logprobs", self.logprobs,
             self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
             f"use an integer from 0 to {MAX_LOGPROBS}"),
        ]  # fmt: skip

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1
