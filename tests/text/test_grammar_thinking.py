"""A grammar with thinking before it: free within the marks, held behind them, and at the beginning either."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moewe.text import Tokenizer, load_tokenizer
from moewe.text.grammar import GrammarError, GrammarTokens
from moewe.text.grammar_thinking import ThinkingMatcher
from tests.support import small_tokenizers


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))


def make(tokenizer: Tokenizer, *, opened: bool, start_id: int | None = None) -> ThinkingMatcher:
    tokens = GrammarTokens(tokenizer, tokenizer.vocab_size)
    answer = tokens.matcher("regex", "[ab]c")
    return ThinkingMatcher(answer, "</t>", opened=opened, start_id=start_id, token_bytes=tokenizer.token_bytes)


def feed(matcher: ThinkingMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        matcher.accept(token)


def texts(matcher: ThinkingMatcher, tokenizer: Tokenizer) -> set[str] | None:
    mask = matcher.mask()
    if mask is None:
        return None
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, "u1"), bitorder="little"))
    return {tokenizer.token_text(int(i)) for i in ids}


def test_thinking_that_the_prompt_opened_is_free_until_its_mark(tokenizer: Tokenizer) -> None:
    matcher = make(tokenizer, opened=True)
    feed(matcher, tokenizer, "the sea {</")
    assert texts(matcher, tokenizer) is None and not matcher.finished
    feed(matcher, tokenizer, "t>")
    assert texts(matcher, tokenizer) == {"a", "b"}
    feed(matcher, tokenizer, "ac")
    assert matcher.finished


def test_a_model_may_think_or_answer_at_once(tokenizer: Tokenizer) -> None:
    mark = tokenizer.bos_token_id
    assert mark is not None
    matcher = make(tokenizer, opened=False, start_id=mark)
    assert texts(matcher, tokenizer) == {"a", "b", "<s>"}
    matcher.accept(mark)
    assert texts(matcher, tokenizer) is None
    feed(matcher, tokenizer, "hm</t>")
    assert texts(matcher, tokenizer) == {"a", "b"}, "it thinks once"
    matcher = make(tokenizer, opened=False, start_id=mark)
    feed(matcher, tokenizer, "b")
    assert texts(matcher, tokenizer) == {"c"}
    with pytest.raises(GrammarError):
        matcher.accept(mark)


def test_without_a_token_for_the_mark_the_answer_comes_at_once(tokenizer: Tokenizer) -> None:
    assert texts(make(tokenizer, opened=False), tokenizer) == {"a", "b"}
