"""How one request wants its tokens chosen and when to end: `SamplingParams`.

Not the sampler (runtime/ranks/sampler.py) and not a wire format (server/protocol/requests.py): one object for both
doors. What needs a model to be checked (token ids, bad words) is checked at the door (runtime/checked_params.py).
Units: tokens; probabilities in [0, 1]; temperature 0 means greedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from .seeds import choice_seed

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
# What a request is taken to generate when work is weighed: most end long before their limit does.
EXPECTED_OUTPUT_TOKENS = 256


class StructuredSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text must look like.

    Attributes:
        kind: one of `text.grammar.GRAMMAR_KINDS`.
        text: the JSON schema, the regular expression, the choices as a JSON list, or the grammar; empty where the kind
            says it all.
        thinking_start, thinking_end: marks between which the model may think first, freely; empty when it does not.
        thinking: the output begins within them.
        call_start: the mark with which the model may begin calls of tools instead, freely; a token of its own. Empty
            when it may not.
    """

    kind: str
    text: str = ""
    thinking_start: str = ""
    thinking_end: str = ""
    thinking: bool = False
    call_start: str = ""

    def __post_init__(self) -> None:
        from ..text.grammar import GRAMMAR_KINDS  # brings a tokenizer along, which most users of this module lack

        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(f"kind={self.kind!r} is not allowed; use one of {', '.join(GRAMMAR_KINDS)}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What to generate for one prompt. Invalid values raise ValueError that names field, value and fix.

    (`gc=False`: one for each request, and none is part of a cycle.)

    Attributes:
        max_tokens: most tokens to generate; None means until the context is full, 0 only runs the prompt.
        min_tokens: so many tokens are generated before an end token, a stop token or a stop string counts.
        n: outputs for the prompt, each with random choices of its own.
        temperature: 0 is greedy; else logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 or -1 keep all.
        min_p: keep tokens at least this likely compared with the most likely one; 0 keeps all.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and for each time.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is none.
        logit_bias: token id -> number added to its logit.
        seed: fixes the random choices whatever else runs; None draws one at admission.
        stop: strings at whose first appearance generation ends; they are not part of the text.
        stop_token_ids: tokens that end generation as end-of-sequence tokens do.
        bad_words: words that are not generated.
        bad_word_tokens: the same as sequences of token ids; the door adds those of `bad_words`.
        ignore_eos: go on past end-of-sequence tokens.
        include_stop_str_in_output: the text ends with what stopped it.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: None, or how many alternatives to report beside each chosen token (0..20).
        prompt_logprobs: the same for each token of the prompt but the first.
        structured: what the text must look like; None leaves it free.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_tokens: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredSpec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "bad_word_tokens"):
            value = getattr(self, name)
            if value is None or isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
        if self.bad_word_tokens and isinstance(self.bad_word_tokens, tuple):
            plain = tuple(tuple(word) if isinstance(word, list) else word for word in self.bad_word_tokens)
            msgspec.structs.force_setattr(self, "bad_word_tokens", plain)
        if self.logit_bias is None or self.logit_bias:
            msgspec.structs.force_setattr(self, "logit_bias", _token_bias(self.logit_bias))
        for value, (field, fine, fix, default) in zip(_VALUES(self), _CHECKS):
            if value is not default and not fine(value):
                raise ValueError(f"{field}={_shown(value)} is not allowed; {fix}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is not allowed; use at most max_tokens, which is {self.max_tokens}"
            )

    def choices(self) -> tuple[SamplingParams, ...]:
        """Return the parameters of each of the `n` outputs, n = 1 each; the first one also reports on the prompt."""
        if self.n == 1:
            return (self,)
        return tuple(
            msgspec.structs.replace(
                self,
                n=1,
                seed=choice_seed(self.seed, choice),
                prompt_logprobs=None if choice else self.prompt_logprobs,
            )
            for choice in range(self.n)
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(low: int, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_int(value) and low <= value <= high


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high


def _or_none(fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fine(value)


def _several(most: int, fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) <= most and all(map(fine, value))


def _is_word(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_bad_word(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


_TOKEN = _integer(0, 2**31 - 1)
_COUNT = _integer(0, math.inf)
_WORD_TOKENS = _several(MAX_BAD_WORD_TOKENS, _TOKEN)
# (field, whether a value is fine, the fix), in the order in which they are looked at.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", _or_none(_COUNT), "use an integer of at least 0, or null for as many as fit"),
    ("min_tokens", _integer(0, 2**31 - 1), "use an integer from 0 to 2147483647"),
    ("n", _integer(1, MAX_CHOICES), f"use an integer from 1 to {MAX_CHOICES}"),
    ("temperature", _number(0, 100), "use a number from 0 (greedy) to 100"),
    ("top_p", lambda value: _is_number(value) and 0 < value <= 1, "use a number above 0 and up to 1"),
    ("top_k", _integer(-1, 2**31 - 1), "use 0 or -1 to keep all tokens, or a positive integer of at most 31 bits"),
    ("min_p", _number(0, 1), "use a number from 0 (keeps all tokens) to 1"),
    ("presence_penalty", _number(-2, 2), "use a number from -2 to 2"),
    ("frequency_penalty", _number(-2, 2), "use a number from -2 to 2"),
    ("repetition_penalty", _number(0.01, 100), "use a number from 0.01 to 100; 1 does nothing"),
    ("logit_bias", lambda value: isinstance(value, dict) and len(value) <= MAX_LOGIT_BIAS,
     f"use up to {MAX_LOGIT_BIAS} token ids, each with a number from -100 to 100"),
    ("seed", _or_none(_integer(-(2**63), 2**63 - 1)), "use an integer of at most 64 bits"),
    ("stop", _several(MAX_STOP_STRINGS, _is_word), f"use up to {MAX_STOP_STRINGS} strings, none empty"),
    ("stop_token_ids", _several(MAX_STOP_TOKENS, _TOKEN), f"use up to {MAX_STOP_TOKENS} token ids, from 0"),
    ("bad_words", _several(MAX_BAD_WORDS, _is_bad_word), f"use up to {MAX_BAD_WORDS} strings, none blank"),
    ("bad_word_tokens", _several(2 * MAX_BAD_WORDS, lambda value: bool(value) and _WORD_TOKENS(value)),
     f"use up to {2 * MAX_BAD_WORDS} sequences of 1 to {MAX_BAD_WORD_TOKENS} token ids"),
    ("ignore_eos", _is_flag, "use true or false"),
    ("include_stop_str_in_output", _is_flag, "use true or false"),
    ("skip_special_tokens", _is_flag, "use true or false"),
    ("logprobs", _or_none(_integer(0, MAX_LOGPROBS)), f"use an integer from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", _or_none(_integer(0, MAX_LOGPROBS)), f"use an integer from 0 to {MAX_LOGPROBS}"),
    ("structured", lambda value: value is None or isinstance(value, StructuredSpec), "use a StructuredSpec"),
)  # fmt: skip
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
# The same with the default, which is fine: most fields of most requests are left at theirs.
_CHECKS = tuple((*rule, _DEFAULTS[rule[0]]) for rule in _RULES)
_VALUES = attrgetter(*(rule[0] for rule in _RULES))


def _token_bias(given: Any) -> Any:
    """Return `given` with whole numbers as keys (JSON has only strings); what is no mapping is left for the checks."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return given
    bias = {}
    for key, value in given.items():
        text_id = isinstance(key, str) and key.isdecimal() and key.isascii() and len(key) < 12
        token = int(key) if text_id else key
        if not _TOKEN(token):
            raise ValueError(f"logit_bias has the key {_shown(key)}, which is no token id; use whole numbers from 0")
        if not _number(-100, 100)(value):
            raise ValueError(
                f"logit_bias has {_shown(value)} for token {token}, which is not allowed; use a number from -100 to 100"
            )
        bias[token] = float(value)
    return bias


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
