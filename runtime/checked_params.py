"""What every door asks of sampling parameters once it knows the model: ids that are tokens, and bad words as tokens.

Not the values by themselves (runtime/params.py) and not the prompt (runtime/prompts.py).
Units: token ids, below the rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..text import Tokenizer
from .params import MAX_BAD_WORD_TOKENS, SamplingParams


def checked_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> SamplingParams:
    """Return `params` as an engine takes them: with `bad_words` as token ids.

    Raises:
        ValueError: an id is no token of the model, or a field needs text and there is no tokenizer.
    """
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_word_tokens", [token for word in params.bad_word_tokens for token in word]),
    ):
        _check_ids(name, ids, vocab_size)
    if tokenizer is None:
        for name in ("stop", "bad_words", "structured"):
            if value := getattr(params, name):
                raise ValueError(f"{name}={value!r} needs text, but there is no tokenizer; leave it out")
    if not params.bad_words or tokenizer is None:
        return params
    words = [sequence for word in params.bad_words for sequence in bad_word_tokens(word, tokenizer)]
    _check_ids("bad_words", [token for word in words for token in word], vocab_size)
    return msgspec.structs.replace(params, bad_words=(), bad_word_tokens=(*params.bad_word_tokens, *words))


def bad_word_tokens(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token sequences that spell `word`: at the start of a text, and after a blank where that differs.

    The second is left out where the blank is a token of its own: the first covers what follows it.

    Raises:
        ValueError: the word has too many tokens, or none.
    """
    bare = word.lstrip()
    first = tuple(tokenizer.encode(bare, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
    found = [first]
    if len(spaced) == len(first) and spaced[:1] != first[:1]:
        found.append(spaced)
    for tokens in found:
        if not 1 <= len(tokens) <= MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"bad_words has {word[:80]!r} of {len(tokens)} tokens; use words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
            )
    return found


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} has token id {token}, which this model lacks; use 0 to {vocab_size - 1}")
