"""A grammar beside tools: at its beginning a text may begin calls, which are free, or the answer, which is held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moewe.text import Tokenizer, load_tokenizer
from moewe.text.grammar import GrammarError, GrammarTokens
from moewe.text.grammar_calls import AnswerOrCalls
from moewe.text.grammar_thinking import ThinkingMatcher
from tests.support import small_tokenizers


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))


def make(tokenizer: Tokenizer) -> AnswerOrCalls:
    mark = tokenizer.single_token("<s>")
    assert mark is not None
    return AnswerOrCalls(GrammarTokens(tokenizer, tokenizer.vocab_size).matcher("regex", "[ab]c"), mark)


def feed(matcher: AnswerOrCalls | ThinkingMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        matcher.accept(token)


def texts(matcher: AnswerOrCalls | ThinkingMatcher, tokenizer: Tokenizer) -> set[str] | None:
    mask = matcher.mask()
    if mask is None:
        return None
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, "u1"), bitorder="little"))
    return {tokenizer.token_text(int(i)) for i in ids}


def test_calls_are_free_once_they_began(tokenizer: Tokenizer) -> None:
    matcher = make(tokenizer)
    assert texts(matcher, tokenizer) == {"a", "b", "<s>"}
    for text in ("<s>", "no answer", "<s>", "ac"):
        feed(matcher, tokenizer, text)
        assert texts(matcher, tokenizer) is None and not matcher.finished


def test_an_answer_is_held_and_no_call_follows_it(tokenizer: Tokenizer) -> None:
    matcher = make(tokenizer)
    feed(matcher, tokenizer, "a")
    assert texts(matcher, tokenizer) == {"c"}
    with pytest.raises(GrammarError):
        feed(matcher, tokenizer, "<s>")
    matcher = make(tokenizer)
    feed(matcher, tokenizer, "bc")
    assert matcher.finished
    with pytest.raises(GrammarError):
        feed(make(tokenizer), tokenizer, "x")


@pytest.mark.parametrize("call", [True, False])
def test_after_its_thinking_a_model_still_has_the_choice(tokenizer: Tokenizer, call: bool) -> None:
    matcher = ThinkingMatcher(
        make(tokenizer),
        "</t>",
        opened=False,
        start_id=tokenizer.single_token("</s>"),
        token_bytes=tokenizer.token_bytes,
    )
    assert texts(matcher, tokenizer) == {"a", "b", "<s>", "</s>"}
    feed(matcher, tokenizer, "</s>hm <s></t>")  # a mark within the thinking is a thought
    assert texts(matcher, tokenizer) == {"a", "b", "<s>"}
    feed(matcher, tokenizer, "<s>x" if call else "ac")
    assert matcher.finished != call
    if call:
        assert texts(matcher, tokenizer) is None


def test_a_text_of_several_tokens_is_no_single_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.single_token("<s>") == tokenizer.bos_token_id
    assert tokenizer.single_token("<tool_call>") is None and tokenizer.single_token("") is None
