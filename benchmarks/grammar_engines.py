"""Which library should follow grammars? Time to compile and to fill a mask, on a real vocabulary, one thread.

Not a test (tests/text/test_grammar.py). Our own classes over llguidance stand against xgrammar, where that is installed
(`pip install xgrammar`; it is no dependency and brings torch and transformers along). Both must accept the same texts,
token by token, before anything is timed. Units: in the names. Example:
`python benchmarks/grammar_engines.py --model ~/.cache/moewe/demo-*`
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records

from moewe.text import Tokenizer, load_tokenizer
from moewe.text.grammar import GrammarTokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
TEXTS = {
    "schema": json.dumps(
        {"name": "Gull", "age": 42, "tags": ["a", "c"], "address": {"street": "At the sea 5", "zip": "12345"}}
    ),
    "any object": json.dumps(
        {"name": "Gull", "numbers": [1, -2.5e3, True, None], "inner": {"text": "a text of a few words"}}
    ),
}


class Ours:
    """llguidance through moewe's own classes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = GrammarTokens(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])

    def compile(self, case: str) -> Any:
        self._tokens._compiled.clear()
        return self.again(case)

    def again(self, case: str) -> Any:
        return self._tokens.matcher("json", json.dumps(SCHEMA if case == "schema" else {"type": "object"}))

    def mask(self, matcher: Any) -> None:
        matcher.mask()

    def accept(self, matcher: Any, token: int) -> None:
        matcher.accept(token)

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.accepting)


class Peer:
    """xgrammar as its documentation uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        vocabulary = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[tokenizer.eos_token_id or 0])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        self._grammars: dict[str, Any] = {}

    def compile(self, case: str) -> Any:
        text = json.dumps(SCHEMA if case == "schema" else {"type": "object"})
        self._grammars[case] = self._compiler.compile_json_schema(text)
        return self._library.GrammarMatcher(self._grammars[case])

    def again(self, case: str) -> Any:
        return self._library.GrammarMatcher(self._grammars[case])

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._bits)

    def accept(self, matcher: Any, token: int) -> None:
        if not matcher.accept_token(token):
            raise ValueError(f"token {token} is not allowed")

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_completed())


def clock(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(engine: Any, tokenizer: Tokenizer, case: str, rounds: int) -> dict[str, Any]:
    ids = tokenizer.encode(TEXTS[case], add_special_tokens=False)
    matcher = engine.compile(case)
    for token in ids:
        engine.accept(matcher, token)
    assert engine.ended(matcher), "the text is complete"
    compile_ms, masks_us, accepts_us = [], [], []
    for _ in range(rounds):
        compile_ms.append(clock(lambda: engine.compile(case)) * 1e3)
        matcher = engine.again(case)
        for token in ids:
            masks_us.append(clock(lambda at=matcher: engine.mask(at)) * 1e6)  # type: ignore[misc]
            accepts_us.append(clock(lambda at=matcher, t=token: engine.accept(at, t)) * 1e6)  # type: ignore[misc]
    return {
        "compile_ms": records.summary(compile_ms),
        "mask_us": records.summary(masks_us),
        "accept_us": records.summary(accepts_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    engines: dict[str, Any] = {"llguidance": Ours}
    if importlib.util.find_spec("xgrammar") is not None:
        engines["xgrammar"] = Peer
    results: dict[str, Any] = {"vocabulary": tokenizer.vocab_size}
    for name, make in engines.items():
        start = time.perf_counter()
        engine = make(tokenizer)
        results[name] = {"tokenizer_ms": (time.perf_counter() - start) * 1e3}
        for case in TEXTS:
            results[name][case] = measure(engine, tokenizer, case, options.rounds)
            figures = {key: round(value["median"], 2) for key, value in results[name][case].items()}
            print(f"{name:12} {case:12} {figures}  mask_us max {results[name][case]['mask_us']['max']:.0f}")
    records.write("grammar_engines", results, options.out)


if __name__ == "__main__":
    main()
