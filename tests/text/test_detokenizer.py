"""Detokenizer: whole characters only, and the same text however the tokens arrive."""

from __future__ import annotations

from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moewe.text import Detokenizer, StopMatcher, Tokenizer
from tests.support.small_tokenizers import KINDS

CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}
EXACT = ["byte_level", "byte_fallback"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), CONFIG)


def one_by_one(tokens: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokens)
    return [detokenizer.add([token_id]) for token_id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("kind", EXACT)
def test_characters_split_over_tokens_come_whole(kind: str) -> None:
    ids = tokenizer(kind).encode("\U0001f600\u010fab", add_special_tokens=False)
    pieces = one_by_one(tokenizer(kind), ids)
    assert len(ids) >= 6
    assert "\ufffd" not in "".join(pieces)
    shown = [piece for piece in pieces if piece.strip()]
    assert shown[:2] == ["\U0001f600", "\u010f"] and "".join(shown[2:]) == "ab"


@pytest.mark.parametrize("kind", EXACT)
def test_character_without_its_last_bytes_is_left_out(kind: str) -> None:
    ids = tokenizer(kind).encode("ab\U0001f600", add_special_tokens=False)[:-1]
    assert "".join(one_by_one(tokenizer(kind), ids)) == "ab"
    assert tokenizer(kind).decode(ids) == "ab"


@pytest.mark.parametrize("kind", EXACT)
def test_bytes_that_are_no_text_become_replacement_characters(kind: str) -> None:
    tokens = tokenizer(kind)
    ids = [*tokens.encode("\U0001f600", add_special_tokens=False)[:-1], *tokens.encode("ab", add_special_tokens=False)]
    text = "".join(one_by_one(tokens, ids))
    assert text.endswith("b") and text.count("\ufffd") == 1


@pytest.mark.parametrize("kind", list(KINDS))
def test_special_tokens_are_not_shown(kind: str) -> None:
    tokens = tokenizer(kind)
    words = tokens.encode("the sea", add_special_tokens=False)
    ids = [tokens.bos_token_id, *words, tokens.eos_token_id]
    assert "".join(one_by_one(tokens, ids)) == "the sea"
    assert tokens.decode(ids, skip_special_tokens=False).endswith("</s>")


def test_continuation_keeps_its_first_blank() -> None:
    tokens = tokenizer("byte_fallback")
    ids = tokens.encode("the", add_special_tokens=False)
    assert Detokenizer(tokens).add(ids) == "the"
    assert Detokenizer(tokens, continuation=True).add(ids) == " the"


def test_tokens_without_fixed_bytes_go_through_windows() -> None:
    tokens = tokenizer("word_piece")
    assert not tokens.has_pieces
    ids = tokens.encode("the gulls flying, the sea.", add_special_tokens=False)
    assert "".join(one_by_one(tokens, ids)) == tokens.decode_window(ids)


@pytest.mark.parametrize("kind", EXACT)
@given(text=st.text(max_size=40))
def test_tokens_one_by_one_give_the_text(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    assert "".join(one_by_one(tokenizer(kind), ids)) == tokenizer(kind).decode(ids) == text


@given(data=st.data(), ids=st.lists(st.integers(0, 331), max_size=40))
def test_any_split_through_detokenizer_and_stop_gives_the_same(data: st.DataObject, ids: list[int]) -> None:
    tokens = tokenizer("byte_level")
    stops = data.draw(st.lists(st.text(alphabet="ae \u00f6", min_size=1, max_size=2), max_size=2))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    parts = [ids[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ids)])]

    def run(parts: list[list[int]]) -> str:
        detokenizer, matcher, shown = Detokenizer(tokens), StopMatcher(stops), ""
        for part in parts:
            text, stopped = matcher.add(detokenizer.add(part))
            shown += text
            if stopped:
                return shown
        text, stopped = matcher.add(detokenizer.flush())
        return shown + text + ("" if stopped else matcher.flush())

    assert run(parts) == run([ids])


@pytest.mark.parametrize("kind", EXACT)
@given(st.lists(st.integers(0, 400), max_size=30), st.booleans(), st.booleans())
def test_one_by_one_gives_what_all_at_once_gives(kind: str, ids: list[int], skips: bool, goes_on: bool) -> None:
    tokens = tokenizer(kind)
    ids = [token_id % tokens.vocab_size for token_id in ids]
    single, whole = (Detokenizer(tokens, continuation=goes_on, skip_special_tokens=skips) for _ in range(2))
    text = "".join(single.add([token_id]) for token_id in ids)
    shown = [token_id for token_id in ids if not (skips and token_id in tokens.special_ids)]
    data = b"".join(map(tokens.token_bytes, shown))
    expected = whole.add(ids)
    assert text == expected
    assert data.decode("utf-8", "replace").startswith(text) or (tokens.strips_first_space and not goes_on)
    assert single.flush() == whole.flush() == ""
