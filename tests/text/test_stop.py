"""StopMatcher: what is shown depends on the text alone, and nothing of a stop string is ever let out."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from moewe.text import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, stopped = matcher.add(piece)
        shown.append(text)
        if stopped:
            assert matcher.flush() == ""
            return "".join(shown), True
    return "".join(shown) + matcher.flush(), False


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first end of any stop; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def test_stop_across_token_borders_shows_nothing_of_it() -> None:
    matcher = StopMatcher(["CDEFG"])
    assert [matcher.add(piece) for piece in ("AB", "CD", "EF", "GH")] == [
        ("AB", False), ("", False), ("", False), ("", True)]  # fmt: skip
    assert matcher.add("more") == ("", True)


def test_false_alarm_is_let_out_at_once() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.add("Hi\n\nUs") == ("Hi", False)
    assert matcher.add("ually") == ("\n\nUsually", False)


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["ab", "c"], ["cd"]) == ("abc", False)


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.add("x") == ("x", False)
    assert matcher.flush() == ""


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    matcher = StopMatcher(["a" * 50_000 + "b"])
    shown = "".join(matcher.add("a" * 100)[0] for _ in range(2_000))
    assert len(shown) == 200_000 - 50_000


letters = st.text(alphabet="abc", max_size=12)


@given(st.lists(letters, max_size=8), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4))
def test_any_split_gives_what_the_text_gives(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == reference("".join(pieces), stops)
