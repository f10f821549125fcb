"""Grammars on a small vocabulary: which tokens may come, when a text may end and when it must."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from moewe.text import Tokenizer, load_tokenizer
from moewe.text.grammar import _LIMITS, KEPT_GRAMMARS, GrammarError, GrammarStuck, GrammarTokens, Matcher
from tests.support import small_tokenizers

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["gull", "Möwe"]},
        "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(small_tokenizers.write(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture
def tokens(tokenizer: Tokenizer) -> GrammarTokens:
    end = tokenizer.eos_token_id
    assert end is not None
    return GrammarTokens(tokenizer, tokenizer.vocab_size + 5, [end, tokenizer.vocab_size + 4])


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, "u1"), bitorder="little")).tolist()


def write(matcher: Matcher, choose: Callable[[list[int]], int], most: int) -> list[int]:
    """Return tokens chosen from the masks until the text is complete."""
    ids: list[int] = []
    while not matcher.finished and len(ids) < most:
        ids.append(choose(allowed(matcher.mask())))
        matcher.accept(ids[-1])
    return ids


@pytest.mark.parametrize("seed", range(5))
def test_random_choices_give_an_instance_of_the_schema_and_no_more(
    tokens: GrammarTokens, tokenizer: Tokenizer, seed: int
) -> None:
    matcher = tokens.matcher("json", json.dumps(SCHEMA))
    ids = write(matcher, random.Random(seed).choice, 2000)
    assert matcher.finished
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text.endswith("}")


def test_any_json_object_is_taken_token_by_token(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    matcher = tokens.matcher("json_object", "")
    rest = '{"a": [1, -2.5e3, true, null, {}], "ö": "\\n"}'.encode()
    while rest:
        assert not matcher.finished
        token = max(
            allowed(matcher.mask()),
            key=lambda i: len(tokenizer.token_bytes(i)) * rest.startswith(tokenizer.token_bytes(i)),
        )
        matcher.accept(token)
        assert rest.startswith(tokenizer.token_bytes(token))
        rest = rest.removeprefix(tokenizer.token_bytes(token))
    assert matcher.finished and matcher.accepting


@pytest.mark.parametrize(
    ("kind", "text", "first"),
    [
        ("regex", "[ab]c", "ab"),
        ("regex", "^a{2,3}$", "a"),
        ("choice", json.dumps(["(yes)", "no*", "Möwe\n", "."]), "(nM."),
        ("grammar", 'start: "x" | y\ny: /[0-9]/', "x0123456789"),
        ("grammar", 'root ::= "x" root | [q-s]', "xqrs"),
        ("json", '{"const": true}', "t"),
        ("json", '{"enum": [1, null]}', "1n"),
    ],
)
def test_first_characters(tokens: GrammarTokens, tokenizer: Tokenizer, kind: str, text: str, first: str) -> None:
    ids = allowed(tokens.matcher(kind, text).mask())
    assert {tokenizer.token_bytes(i)[:1].decode("utf-8", "replace") for i in ids} == set(first)


def test_end_tokens_come_where_the_text_may_end_and_only_there(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    matcher = tokens.matcher("regex", "a+")
    ends = {tokenizer.eos_token_id, tokenizer.vocab_size + 4}
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    assert not matcher.accepting and not ends & set(allowed(matcher.mask()))
    matcher.accept(letter)
    assert matcher.accepting and not matcher.finished
    assert ends <= set(allowed(matcher.mask()))
    assert not ends & set(allowed(matcher.mask(may_end=False))), "who wants more gets no end"
    matcher.accept(letter)
    assert ends <= set(allowed(matcher.mask()))


def test_special_and_missing_tokens_are_never_allowed_in_text(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    ids = set(allowed(tokens.matcher("regex", r"(?s:.)*").mask(may_end=False)))
    assert ids and not ids & tokenizer.special_ids
    assert max(ids) < tokenizer.vocab_size


def test_a_token_that_is_not_allowed_is_an_error_of_this_text_only(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    wrong, right = (tokens.matcher("regex", "aa") for _ in range(2))
    with pytest.raises(GrammarError):
        wrong.accept(tokenizer.encode("s", add_special_tokens=False)[-1])
    right.accept(tokenizer.encode("a", add_special_tokens=False)[-1])
    assert allowed(right.mask())


def test_a_grammar_that_the_vocabulary_cannot_write_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))
    few = GrammarTokens(tokenizer, 40)  # only the first rows: some letters are missing
    assert b"\xf0" not in {tokenizer.token_bytes(i) for i in range(40)}
    with pytest.raises(GrammarError):
        few.matcher("regex", "\U0001f426").mask()


@pytest.mark.parametrize(("kind", "text"), [("regex", "!\U0001f426"), ("grammar", 'start: "!" "\U0001f426"')])
def test_a_grammar_that_leads_to_what_no_token_writes_says_so_there(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))
    matcher = GrammarTokens(tokenizer, 40).matcher(kind, text)
    (first,) = allowed(matcher.mask())
    assert tokenizer.token_bytes(first) == b"!"
    matcher.accept(first)
    with pytest.raises(GrammarStuck, match="no token of this model comes next"):
        matcher.mask()


@pytest.mark.parametrize("where", ["name", "value"])
def test_a_forced_text_that_no_token_writes_is_a_dead_end_too(tmp_path: Path, where: str) -> None:
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))
    few = GrammarTokens(tokenizer, 188)  # letters and brackets, but no bytes from 80 to a0
    name, value = ("ab\U0001f426cd", "x") if where == "name" else ("x", "ab\U0001f426cd")
    schema = {"type": "object", "properties": {name: {"const": value}}, "required": [name]}
    schema["additionalProperties"] = False
    matcher = few.matcher("json", json.dumps(schema))
    with pytest.raises(GrammarStuck, match="no token of this model comes next"):
        write(matcher, lambda ids: ids[0], 40)


def test_a_grammar_that_grows_too_complex_on_the_way_says_so_there(
    tokens: GrammarTokens, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_LIMITS, "max_lexer_states", 1000)
    matcher = tokens.matcher("regex", "(x[a-z]{0,200}){3}")
    letter = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"x")
    with pytest.raises(GrammarStuck, match=r"too complex there \(lexer error: .*\); make it simpler"):
        for _ in range(600):
            matcher.accept(letter)
            matcher.mask()


def test_a_choice_with_a_character_that_no_token_writes_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))
    few = GrammarTokens(tokenizer, 40)
    assert few.matcher("choice", '["!", "!1"]').mask()
    with pytest.raises(GrammarError, match=r"choice 1 holds '\\U0001f426', for which this model has no token"):
        few.matcher("choice", json.dumps(["!", "!\U0001f426"]))


def test_tokens_without_fixed_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="different text in different places"):
        GrammarTokens(load_tokenizer(small_tokenizers.write(tmp_path, "word_piece")), 11)


def test_few_compiled_grammars_are_kept(tokens: GrammarTokens) -> None:
    for number in range(KEPT_GRAMMARS + 5):
        tokens.matcher("regex", f"a{number}")
    assert len(tokens._compiled) == KEPT_GRAMMARS


WRONG = [
    ("regex", "foo**", "repeats nothing"),
    ("regex", "", "empty"),
    ("regex", "a" * 300_000, "300000 characters"),
    ("regex", r"[^\s\S]", "no text fulfils it"),
    ("regex", "[z-a]", "invalid"),
    ("choice", "[]", "list of texts"),
    ("choice", '["a", ""]', "none of them empty"),
    ("choice", '"a"', "list of texts"),
    ("grammar", "nonsense", "Expected"),
    ("grammar", " ", "empty"),
    ("grammar", "root ::= (", "GBNF"),
    ("grammar", 'start: A\nA: A "x"', "circular"),
    ("json", "{", "not JSON"),
    ("json", '{"const": NaN}', "no number"),
    ("json", '{"items":' * 9000 + "{}" + "}" * 9000, "not JSON"),
    ("json", '{"items":' * 300 + "{}" + "}" * 300, "too deep"),
    ("json", '{"type": "strng"}', "no type"),
    ("json", '{"$ref": "#"}', "no text fulfils it"),
    ("json", "false", "no text fulfils it"),
    ("json", '{"not": {"type": "string"}}', "not"),
    ("json", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
    ("yaml", "", "not known"),
]


@pytest.mark.parametrize(("kind", "text", "why"), WRONG, ids=[f"{k} {t[:20]}" for k, t, _ in WRONG])
def test_what_is_no_grammar_is_refused_in_one_line(tokens: GrammarTokens, kind: str, text: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        tokens.matcher(kind, text).mask()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
