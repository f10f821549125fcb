"""TextOutput: what a client reads of a request's tokens."""

from __future__ import annotations

from functools import cache

import pytest

from moewe.runtime.params import SamplingParams
from moewe.runtime.text_output import TextOutput
from moewe.text import Tokenizer
from tests.support.small_tokenizers import byte_fallback


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>"})


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_end_token_is_not_shown_even_when_it_is_an_ordinary_token() -> None:
    output = TextOutput(tokenizer(), SamplingParams())
    assert output.add(ids("the"), None) == (" the", False)
    assert output.add(ids("sea")[-1:], "stop") == ("", False)


def test_length_shows_the_last_token() -> None:
    assert TextOutput(tokenizer(), SamplingParams()).add(ids("the"), "length") == (" the", False)


def test_stop_string_cuts_and_what_may_begin_one_is_held_until_the_end() -> None:
    output = TextOutput(tokenizer(), SamplingParams(stop=("se",)))
    assert output.add(ids("as"), None) == (" a", False)
    assert output.add(ids("e")[-1:], None) == ("", True)
    output = TextOutput(tokenizer(), SamplingParams(stop=("se",)))
    assert output.add(ids("as"), "length") == (" as", False)


def test_stop_string_in_the_last_token_still_counts() -> None:
    output = TextOutput(tokenizer(), SamplingParams(stop=("s",)))
    assert output.add(ids("as"), "length") == (" a", True)


def test_unfinished_character_is_held() -> None:
    output = TextOutput(tokenizer(), SamplingParams())
    emoji = ids("\U0001f600")[-4:]
    assert output.add(emoji[:2], None) == ("", False)
    assert output.add(emoji[2:], None) == ("\U0001f600", False)


def test_without_tokenizer_there_is_no_text() -> None:
    assert TextOutput(None, SamplingParams()).add([1, 2], "length") == ("", False)
    with pytest.raises(ValueError, match="stop="):
        TextOutput(None, SamplingParams(stop=("a",)))
