"""Regular expressions: what is one, what is none, and where it goes wrong."""

from __future__ import annotations

import pytest

from moewe.text.regex_syntax import MAX_NESTING, RegexError, check_regex

SOUND = [
    "",
    "abc",
    "a*b+c?",
    "a{2}b{2,}c{2,3}",
    "a*?b+?c??d{1,2}?",
    "(a|b|)",
    "(?:a)(?P<n>b)(?<m>c)(?i:d)",
    "(?i)a",
    "(a*)*",
    "[a-z]*",
    "[]a]+",
    "[^]a]",
    r"[\]]+",
    "[a[b-c]]*",
    "[[:alpha:]]+",
    "[*+?{]",
    r"\*\+\{",
    r"\p{L}{2}",
    r"\x{1F426}+",
    r"\d+\.\d*",
    "^a$",
    "é*\U0001f426+",
    "a}",
    "]",
]
WRONG = [
    ("foo**", 4, "repeats"),
    ("a+*", 2, "repeats"),
    ("a{2}{3}", 4, "repeats"),
    ("a*+", 2, "repeats"),
    ("*a", 0, "repeats"),
    ("(*a)", 1, "repeats"),
    ("a|+", 2, "repeats"),
    ("^*", 1, "repeats"),
    (r"\b+", 2, "repeats"),
    ("a???", 3, "repeats"),
    ("(a", 2, "not closed"),
    ("a)", 1, "closes no group"),
    ("[a", 0, "class is not closed"),
    ("[]", 0, "class is not closed"),
    ("a{3,1}", 1, "counts down"),
    ("a{x}", 1, "no count"),
    ("{", 0, "no count"),
    ("a\\", 1, "backslash"),
    ("(?=a)", 0, "look-ahead"),
    ("(?<!a)b", 0, "look-ahead"),
    (r"(a)\1", 3, "back-references"),
    (r"\k<a>", 0, "back-ref"),
    ("(?x:a)", 0, "no group"),
    (r"\p{L", 0, "not closed"),
    ("(" * (MAX_NESTING + 1), MAX_NESTING + 1, "inside each other"),
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_expressions_pass(text: str) -> None:
    check_regex(text)


@pytest.mark.parametrize(("text", "at", "why"), WRONG)
def test_wrong_expressions_are_refused_with_the_place(text: str, at: int, why: str) -> None:
    with pytest.raises(RegexError, match=why) as caught:
        check_regex(text)
    assert f"at character {at} of" in str(caught.value)
    assert len(str(caught.value)) < 200
