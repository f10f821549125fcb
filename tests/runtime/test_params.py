"""SamplingParams and what a door adds: values that are refused, ids that are tokens, bad words, seeds of choices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moewe.runtime import params
from moewe.runtime.checked_params import bad_word_tokens, checked_params
from moewe.runtime.params import MAX_BAD_WORD_TOKENS, SamplingParams, StructuredSpec
from moewe.text import Tokenizer
from tests.support.small_tokenizers import byte_fallback

VOCAB = 512


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("min_tokens", -1), ("min_tokens", None),
        ("n", 0), ("n", 129), ("n", None), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", 101),
        ("temperature", "1"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**31), ("min_tokens", 2**31),
        ("min_p", -0.1), ("min_p", 1.1),
        ("min_p", float("nan")), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")), ("logit_bias", [1]), ("logit_bias", "1"),
        ("logit_bias", {i: 1 for i in range(1025)}), ("seed", 2**63), ("stop", ("",)), ("stop", (1,)),
        ("stop", ("a",) * 17), ("stop_token_ids", (-1,)), ("stop_token_ids", ("1",)), ("stop_token_ids", 5),
        ("stop_token_ids", tuple(range(257))), ("bad_words", ("",)), ("bad_words", (" ",)), ("bad_words", "bad"),
        ("bad_words", ("a",) * 257), ("bad_word_tokens", ((),)), ("bad_word_tokens", ((1.0,),)),
        ("bad_word_tokens", ((1,) * 65,)), ("ignore_eos", 1), ("include_stop_str_in_output", None),
        ("skip_special_tokens", "yes"), ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", -1),
        ("prompt_logprobs", 21), ("structured", "json"),
    ],
)  # fmt: skip
def test_wrong_values_are_one_line_with_field_value_and_fix(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}=.* is not allowed; use ") as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({"abc": 1}, "key 'abc'"), ({-1: 1}, "key -1"), ({"-1": 1}, "key '-1'"), ({1.0: 1}, "key 1.0"),
        ({True: 1}, "key True"), ({2**31: 1}, f"key {2**31}"), ({"²": 1}, "key '²'"), ({5: 101}, "101 for token 5"),
        ({5: float("nan")}, "nan for token 5"), ({5: None}, "None for token 5"), ({"5": "1"}, "'1' for token 5"),
    ],
)  # fmt: skip
def test_wrong_biases_name_the_key(bias: Any, says: str) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias has .*; use ") as caught:
        SamplingParams(logit_bias=bias)
    assert says in str(caught.value)


def test_values_of_json_are_taken() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=[3], bad_words=["a"], bad_word_tokens=[[1, 2]], logit_bias={"5": 1}
    )
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("x",), (3,), ("a",))
    assert params.bad_word_tokens == ((1, 2),) and params.logit_bias == {5: 1.0}
    assert SamplingParams(stop=None, logit_bias=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(max_tokens=0).max_tokens == 0


def test_they_travel_as_they_are() -> None:
    params = SamplingParams(
        n=3, seed=-5, logit_bias={5: -1.5}, bad_word_tokens=((1, 2), (3,)), stop_token_ids=(4,), prompt_logprobs=2,
        structured=StructuredSpec(kind="regex", text="a+"),
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_defaults_which_are_not_looked_at_again_are_fine() -> None:
    defaults = {field: (default, fine) for field, fine, _, default in params._CHECKS}
    assert set(defaults) == set(SamplingParams.__struct_fields__)
    assert all(fine(default) for name, (default, fine) in defaults.items() if name != "logit_bias")
    with pytest.raises(ValueError, match="top_k=False"):  # equal to the default, and not the default
        SamplingParams(top_k=False)
    with pytest.raises(ValueError, match="ignore_eos=0"):
        SamplingParams(ignore_eos=0)


def test_min_tokens_must_leave_room() -> None:
    with pytest.raises(ValueError, match=r"min_tokens=5 is not allowed; use at most max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_choices_have_seeds_of_their_own_and_one_reports_on_the_prompt() -> None:
    params = SamplingParams(n=4, seed=42, prompt_logprobs=1)
    choices = params.choices()
    assert [choice.n for choice in choices] == [1] * 4
    assert [choice.prompt_logprobs for choice in choices] == [1, None, None, None]
    assert choices[0].seed == 42 and len({choice.seed for choice in choices}) == 4
    assert choices == params.choices() and choices[:2] == SamplingParams(n=2, seed=42, prompt_logprobs=1).choices()
    other = SamplingParams(n=4, seed=43).choices()
    assert not {choice.seed for choice in other} & {choice.seed for choice in choices}
    assert [choice.seed for choice in SamplingParams(n=3).choices()] == [None] * 3
    assert all(-(2**63) <= seed < 2**63 for seed in (c.seed for c in SamplingParams(n=9, seed=-(2**63)).choices()))


# --- P-API-05, and the other ids --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logit_bias": {99999: 5.0}}, "logit_bias has token id 99999"),
        ({"stop_token_ids": (5, 512)}, "stop_token_ids has token id 512"),
        ({"bad_word_tokens": ((1, 600),)}, "bad_word_tokens has token id 600"),
    ],
)
def test_ids_beyond_the_vocabulary_are_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^{says}, which this model lacks; use 0 to 511$"):
        checked_params(SamplingParams(**fields), tokenizer(), VOCAB)


def test_what_needs_text_is_refused_without_a_tokenizer() -> None:
    for fields in ({"stop": ("a",)}, {"bad_words": ("a",)}, {"structured": StructuredSpec(kind="json_object")}):
        with pytest.raises(ValueError, match=rf"^{next(iter(fields))}=.*needs text.*leave it out"):
            checked_params(SamplingParams(**fields), None, VOCAB)
    plain = SamplingParams(bad_word_tokens=((1,),), logit_bias={511: 1.0})
    assert checked_params(plain, None, VOCAB) is plain


class Spelling:
    """A tokenizer that knows a few texts."""

    def __init__(self, **known: list[int]) -> None:
        self.known = {name.replace("_", " "): tokens for name, tokens in known.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.known[text]


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({"bad": [7], "_bad": [8]}, [(7,), (8,)]),
        ({"bad": [7, 9], "_bad": [8, 9]}, [(7, 9), (8, 9)]),
        ({"bad": [7], "_bad": [3, 7]}, [(7,)]),  # the blank is a token of its own
        ({"bad": [7], "_bad": [7]}, [(7,)]),  # the tokenizer adds a blank anyway
    ],
)
def test_a_bad_word_is_spelled_with_and_without_a_blank(known: dict[str, list[int]], found: list[Any]) -> None:
    spelling: Any = Spelling(**known)
    assert bad_word_tokens("bad", spelling) == bad_word_tokens("  bad", spelling) == found


def test_bad_words_become_tokens() -> None:
    checked = checked_params(SamplingParams(bad_words=("the",), bad_word_tokens=((5,),)), tokenizer(), VOCAB)
    assert checked.bad_words == () and checked.bad_word_tokens[0] == (5,) and len(checked.bad_word_tokens) >= 2
    assert checked_params(checked, tokenizer(), VOCAB) is checked
    with pytest.raises(ValueError, match=rf"bad_words has .* tokens; use words of 1 to {MAX_BAD_WORD_TOKENS} tokens"):
        checked_params(SamplingParams(bad_words=("\U0001f600" * 40,)), tokenizer(), VOCAB)
