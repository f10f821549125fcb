"""Grammars that an answer is held to: from what a client sends to which tokens may come next.

Not a scheduler and not a limit on time: `grammar_check.py` tries a grammar in a process that can be killed before any
engine sees it. The work is done by llguidance, which lets other threads run meanwhile.
Shapes: a mask is little-endian u32 words [ceil(V / 32)]; bit i of word w allows token 32 * w + i. V is the number of
rows of the model's embedding, which may be more than the tokenizer has.
"""

from __future__ import annotations

import functools
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from .json_schema import SchemaError, check_schema
from .one_line import shorten
from .regex_syntax import RegexError, check_regex
from .tokenizer import Tokenizer

JSON, JSON_OBJECT, REGEX, CHOICE, GRAMMAR = GRAMMAR_KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_GRAMMAR_CHARS = 256 * 1024
# Compiled grammars that wait for the next request that sends the same.
KEPT_GRAMMARS = 64
# What one grammar may cost: states are some 2 kB each; fuel is about 50,000 a millisecond, 14,000 in a step.
_LIMITS: dict[str, Any] = {"max_lexer_states": 20_000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000,
           "step_max_items": 50_000, "max_grammar_size": 500_000, "verbose_errors": False}  # fmt: skip
# A space, or a line break with its indentation: without a bound a model that likes blanks writes nothing else.
_BLANKS = r"(\x20|\r?\n[\x20\t]{0,40})"
# Not every vocabulary has a token for each byte: those of control characters and of rare scripts may be missing.
_DEAD_END = "no token of this model comes next; ask for no characters that the model has no tokens for"


class GrammarError(ValueError):
    """A grammar that cannot be used; the text says what is wrong with it, in one line."""


class GrammarStuck(GrammarError):
    """A grammar that was fine until the text got to where nothing can follow, or where it is too complex."""


def grammar_source(kind: str, text: str) -> str:
    """Return what a client sent in the form that the grammar library reads, after the checks that cost next to nothing.

    Args:
        kind: one of GRAMMAR_KINDS.
        text: a JSON schema, a regular expression, a JSON list of strings, a grammar (Lark or GBNF); nothing for
            `json_object`.

    Raises:
        GrammarError: the text is not what `kind` says.
    """
    from llguidance import LLMatcher

    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(text)} characters; use at most {MAX_GRAMMAR_CHARS}")
    if kind == REGEX:
        return str(LLMatcher.grammar_from_regex(_checked_regex(text)))
    if kind == CHOICE:
        return str(LLMatcher.grammar_from_regex("|".join(map(_literal, _choices(text)))))
    if kind == GRAMMAR:
        return str(LLMatcher.grammar_from_lark(_as_lark(text)))
    if kind not in (JSON, JSON_OBJECT):
        raise GrammarError(f"kind {kind!r} is not known; use one of {', '.join(GRAMMAR_KINDS)}")
    schema = {"type": "object"} if kind == JSON_OBJECT else _schema(text)
    options: Any = {"whitespace_pattern": _BLANKS, "coerce_one_of": True}
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except (ValueError, RecursionError) as error:
        reason = _reason(str(error))
        deep = isinstance(error, RecursionError) or "recursion" in reason
        raise GrammarError(f"{'it nests too deep' if deep else 'it cannot be read'} ({reason})") from None


class GrammarTokens:
    """The tokens of one model as grammars see them, and the grammars compiled for it; safe to use from many threads.

    Args:
        tokenizer: each of its tokens must stand for fixed bytes.
        vocab_size: V.
        end_token_ids: tokens that end a text; a mask allows them where the grammar may end.

    Raises:
        GrammarError: the tokenizer has tokens that stand for different bytes in different places.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int] = ()) -> None:
        if not tokenizer.has_pieces:
            raise GrammarError("the tokens of this model stand for different text in different places, which no "
                               "grammar can follow")  # fmt: skip
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        ends = [token for token in end_token_ids if token < vocab_size]
        self.ends = _bits(ends, self.num_words)
        special = tokenizer.special_ids | set(ends)
        pieces = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._library = _library_tokens(pieces, sorted(token for token in special if token < vocab_size), tokenizer)
        self._spellings = {pieces[token] for token in range(vocab_size) if token not in special}
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = Lock()

    def matcher(self, kind: str, text: str) -> Matcher:
        """Return a matcher at the beginning of a text. Takes milliseconds for most grammars, nothing the second time.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        key = (kind, text)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
                return Matcher(compiled.deep_copy(), self)
        source = grammar_source(kind, text)
        if kind == CHOICE:
            self._check_spelled(_choices(text))
        compiled = compile_source(source, self._library)
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self)

    def _check_spelled(self, choices: list[str]) -> None:
        """Refuse texts that end in the middle, since no token writes one of their characters nor its bytes."""
        for number, choice in enumerate(choices):
            for character in sorted(set(choice)):
                data = character.encode()
                if data not in self._spellings and any(bytes([byte]) not in self._spellings for byte in data):
                    raise GrammarError(f"choice {number} holds {character!a}, for which this model has no token; "
                                       "leave it out")  # fmt: skip


class Matcher:
    """Follows one text through its grammar; made by `GrammarTokens.matcher`, used by one thread at a time.

    Args:
        state: the library's.
        tokens: what it was compiled for.
    """

    def __init__(self, state: Any, tokens: GrammarTokens) -> None:
        self._state = state
        self._tokens = tokens

    @property
    def accepting(self) -> bool:
        """True when the text may end here."""
        return bool(self._state.is_accepting())

    @property
    def finished(self) -> bool:
        """True when the text is complete and nothing may follow."""
        return bool(self._state.is_stopped())

    def accept(self, token_id: int) -> None:
        """Go on by one token.

        Raises:
            GrammarError: the grammar does not allow it here.
            GrammarStuck: it is too complex there.
        """
        if not self._state.consume_token(token_id):
            raise _failure(self._state.get_error() or f"token {token_id} is not allowed here")

    def mask(self, *, may_end: bool = True) -> bytes:
        """Return which tokens may come next. Where only the end may, they are the end tokens whatever is asked.

        Args:
            may_end: allow the end tokens where the grammar may end; False for who wants more text.

        Raises:
            GrammarStuck: no token is allowed, or the grammar is too complex there.
        """
        tokens = self._tokens
        words = np.frombuffer(self._state.compute_bitmask(), "<u4")[: tokens.num_words].copy()
        if self._state.is_error():
            raise _failure(self._state.get_error())
        if tokens.vocab_size % 32:  # the library's own end token sits behind the last
            words[-1] &= np.uint32((1 << tokens.vocab_size % 32) - 1)
        if self.accepting and (may_end or not words.any()):
            words |= tokens.ends
        if not words.any():
            raise GrammarStuck(_DEAD_END)
        return words.tobytes()


def compile_source(source: str, library_tokens: Any) -> Any:
    """Return the library's matcher of a grammar that `grammar_source` made.

    Raises:
        GrammarError: it does not compile, or allows no text at all.
    """
    from llguidance import LLMatcher, LLParserLimits

    state = LLMatcher(library_tokens, source, log_level=0, limits=LLParserLimits(**_LIMITS))
    if not state.is_error():
        state.compute_bitmask()
    if state.is_error():
        raise GrammarError(_reason(state.get_error()) or "it does not compile")
    return state


@functools.cache
def byte_tokens() -> Any:
    """Return the library's tokens of a model that writes single bytes: enough to tell whether a grammar compiles."""
    return _library_tokens([bytes([byte]) for byte in range(256)], [])


class _Pieces:
    """A vocabulary in the form that the library asks for. Its end token is none of the model's: we add those.

    Calling it gives the tokens of a text that the grammar forces: as the model's own tokenizer splits it where that
    gives the text back, else the longest tokens that fit, and our end token (which no mask allows) where none does:
    after fewer tokens than that the library would go on as if the whole text had been written.
    """

    bos_token_id = None

    def __init__(self, pieces: list[bytes], special: list[int], tokenizer: Tokenizer | None) -> None:
        self.eos_token_id = len(pieces)
        self.tokens = [*pieces, b"<end of text>"]
        self.special_token_ids = [*special, self.eos_token_id]
        self._tokenizer = tokenizer
        barred = set(special)
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece and token not in barred}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        data = text.encode()  # raises for bytes: so the library learns that it must send whole characters
        if self._tokenizer is not None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            known = max(ids, default=0) < self.eos_token_id  # a tokenizer may have more tokens than the model
            if known and b"".join(self.tokens[token] for token in ids) == data:
                return ids
        ids, at = [], 0
        while at < len(data):
            size = next(
                (n for n in range(min(self._longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), 0
            )
            if not size:
                return [*ids, self.eos_token_id]
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids


def _library_tokens(pieces: list[bytes], special: list[int], tokenizer: Tokenizer | None = None) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Pieces(pieces, special, tokenizer)))


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not JSON ({error})") from None
    try:
        check_schema(schema)
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    if schema is False:
        raise GrammarError("no text fulfils it")
    return {} if schema is True else schema


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _checked_regex(text: str) -> str:
    if not text:
        raise GrammarError("it is empty; write what the text must look like")
    try:
        check_regex(text)
    except RegexError as error:
        raise GrammarError(f"it is not a regular expression that can be used: {error}") from None
    return text


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("it must be a list of texts, none of them empty")
    return choices


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)


def _as_lark(text: str) -> str:
    """Return a grammar in Lark's form; llama.cpp's is told by its `::=`."""
    if not text.strip():
        raise GrammarError("it is empty; write what the text must look like")
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter has errors of many kinds
        raise GrammarError(f"it is not a GBNF grammar ({_reason(str(error))})") from None


def _bits(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    words = np.zeros(num_words, np.uint32)
    for token in token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def _failure(message: str) -> GrammarError:
    """Return the error of a text on its way: is it the grammar's own making, or ours or the library's?"""
    if "NoExtension" in message:
        return GrammarStuck(_DEAD_END)
    if "lexer error" in message or "TooComplex" in message:
        return GrammarStuck(f"it is too complex there ({_reason(message)}); make it simpler")
    return GrammarError(_reason(message) or "it failed")


def _reason(message: str) -> str:
    """Return the library's message in one line, without its drawings of the place."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if "NoExtension" in text:
        return "no text fulfils it"
    refused = re.match(r"Unimplemented keys: \[(.*)\]$", text)
    if refused:
        return f"what {shorten(refused[1], 200)} asks for cannot be held; leave it out"
    return shorten(text, 300)
