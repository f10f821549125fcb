"""TextOutput: what a client reads of a request's tokens, and how many of them count."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewe.runtime.params import SamplingParams
from moewe.runtime.text_output import Shown, TextOutput
from moewe.text import Tokenizer
from tests.support.small_tokenizers import byte_fallback


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>"})


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def output(**fields: object) -> TextOutput:
    return TextOutput(tokenizer(), SamplingParams(**fields))


def texts(made: TextOutput, pieces: list[list[int]], reason: str | None = "length") -> list[str]:
    reasons = [None] * (len(pieces) - 1) + [reason]
    return [made.add(piece, why).text for piece, why in zip(pieces, reasons, strict=True)]


def test_end_token_is_not_shown_even_when_it_is_an_ordinary_token() -> None:
    made = output()
    assert made.add(ids("the"), None).text == " the"
    assert made.add(ids("sea")[-1:], "stop") == Shown("", None, 1)


def test_an_end_token_is_shown_when_asked_and_a_special_one_only_with_special_tokens() -> None:
    word, eos = ids("the"), [tokenizer().eos_token_id]
    assert texts(output(include_stop_str_in_output=True), [word, ids("sea")[-1:]], "stop")[1] != ""
    assert texts(output(include_stop_str_in_output=True), [word, eos], "stop") == [" the", ""]
    wanted = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert texts(output(**wanted), [word, eos], "stop") == [" the", "</s>"]
    assert texts(output(skip_special_tokens=False), [[*eos, *word]]) == ["</s> the"]


def test_length_shows_the_last_token() -> None:
    assert output().add(ids("the"), "length") == Shown(" the", None, len(ids("the")))


def test_stop_string_cuts_and_what_may_begin_one_is_held_until_the_end() -> None:
    made = output(stop=("se",))
    assert made.add(ids("as"), None).text == " a"
    assert made.add(ids("e")[-1:], None) == Shown("", "se", 1)
    assert texts(output(stop=("se",)), [ids("as")]) == [" as"]


def test_stop_string_in_the_last_token_still_counts() -> None:
    shown = output(stop=("s",)).add(ids("as"), "length")
    assert (shown.text, shown.stop) == (" a", "s")


def test_stop_string_may_be_part_of_the_text() -> None:
    made = output(stop=("se",), include_stop_str_in_output=True)
    assert made.add(ids("as"), None).text == " a"
    assert made.add([*ids("e")[-1:], *ids("the")], None) == Shown("se", "se", 1)


def test_tokens_behind_a_stop_string_do_not_count_and_the_first_end_wins() -> None:
    letters = [ids("as")[-1], ids("e")[-1], *ids("the")]
    assert output(stop=("se",)).add(letters, None) == Shown("", "se", 2)
    assert output(stop=("se",)).add([*letters, tokenizer().eos_token_id], "stop") == Shown("", "se", 2)
    before = output(stop=("se",)).add([*letters[:1], letters[1]], "stop")  # the token that would complete it is an end
    assert before == Shown("s", None, 2)


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, 2), (1, 2), (2, 5), (3, 5), (4, 5), (5, None)])
def test_a_stop_string_counts_only_behind_min_tokens(min_tokens: int, ends: int | None) -> None:
    s, e = ids("as")[-1], ids("e")[-1]
    tokens = [s, e, e, s, e]
    for step in (1, 5):
        made = output(stop=("se",), min_tokens=min_tokens)
        used, text, stop = 0, "", None
        for start in range(0, 5, step):
            shown = made.add(tokens[start : start + step], "length" if start + step >= 5 else None)
            used, text, stop = used + shown.num_tokens, text + shown.text, shown.stop
            if stop:
                break
        assert (used, stop) == ((ends, "se") if ends else (5, None))
        assert text == ("" if ends == 2 else "see" if ends else "seese")


def test_unfinished_character_is_held() -> None:
    made = output()
    emoji = ids("\U0001f600")[-4:]
    assert made.add(emoji[:2], None).text == ""
    assert made.add(emoji[2:], None).text == "\U0001f600"


def test_without_tokenizer_there_is_no_text() -> None:
    assert TextOutput(None, SamplingParams()).add([1, 2], "length") == Shown("", None, 2)
    with pytest.raises(ValueError, match="stop="):
        TextOutput(None, SamplingParams(stop=("a",)))


@settings(max_examples=80, deadline=None)
@given(
    st.text("ase", min_size=1, max_size=12),
    st.lists(st.text("ase", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 6),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_the_outcome_does_not_depend_on_how_tokens_come(
    text: str, stops: list[str], min_tokens: int, sizes: list[int]
) -> None:
    tokens = [token for letter in text for token in ids("as" if letter == "s" else letter)[-1:]]

    def run(sizes: list[int]) -> tuple[str, str | None, int]:
        made, at, shown_text, used = output(stop=tuple(stops), min_tokens=min_tokens), 0, "", 0
        for size in sizes:
            piece = tokens[at : at + size]
            at += size
            shown = made.add(piece, "length" if at >= len(tokens) else None)
            shown_text, used = shown_text + shown.text, used + shown.num_tokens
            if shown.stop or at >= len(tokens):
                return shown_text, shown.stop, used
        raise AssertionError("unreachable")

    assert run(sizes) == run([1] * len(tokens)) == run([len(tokens)])
