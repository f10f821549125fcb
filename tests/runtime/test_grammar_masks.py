"""Masks come from threads: in order for each request, and nothing that goes wrong in one reaches another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moewe.runtime import grammar_masks
from moewe.runtime.grammar_masks import GrammarMasks, MadeMask, grammar_matchers
from moewe.runtime.messages import GRAMMAR_STUCK, INVALID_GRAMMAR
from moewe.runtime.params import StructuredSpec
from moewe.text import load_tokenizer
from moewe.text.grammar import GrammarError, GrammarStuck
from tests.support import small_tokenizers

WAIT_S = 20.0


class Counting:
    """Allows the token after the last one, `length` times; `gate` holds it up when its text is `wait`."""

    def __init__(self, text: str, gate: threading.Event) -> None:
        self.left, self.text, self.gate, self.next = 3, text, gate, 0

    @property
    def finished(self) -> bool:
        return self.left == 0

    def accept(self, token_id: int) -> None:
        if token_id != self.next:
            raise ValueError(f"token {token_id} is not allowed here")
        self.left, self.next = self.left - 1, token_id + 1

    def mask(self, *, may_end: bool = True) -> bytes | None:
        if self.text == "wait":
            self.gate.wait(WAIT_S)
        if self.text == "panic":
            raise KeyboardInterrupt
        if self.text == "stuck" and self.next == 1:
            raise GrammarStuck("no token comes next")
        return None if self.text == "free" else bytes([self.next, may_end])


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def masks(gate: threading.Event) -> Iterator[GrammarMasks]:
    def make(spec: StructuredSpec) -> Counting:
        if spec.text == "bad":
            raise GrammarError("no text fulfils it")
        return Counting(spec.text, gate)

    masks = GrammarMasks(make)
    yield masks
    masks.shutdown()


def begin(masks: GrammarMasks, name: str, text: str = "") -> None:
    masks.open(name, StructuredSpec(kind="regex", text=text), may_end=True)


def one(masks: GrammarMasks) -> MadeMask:
    made = masks.collect(WAIT_S, for_any=True)
    assert len(made) == 1
    return made[0]


def test_a_request_goes_on_from_mask_to_mask_and_ends(masks: GrammarMasks) -> None:
    begin(masks, "a")
    assert one(masks) == MadeMask(request_id="a", mask=b"\0\1")
    masks.advance("a", [0], may_end=False)
    assert one(masks) == MadeMask(request_id="a", mask=b"\1\0")
    masks.advance("a", [1, 2], may_end=True)
    assert one(masks) == MadeMask(request_id="a", finished=True)
    masks.close("a")
    assert (masks.num_open, masks.num_pending) == (0, 0)


def test_none_allows_everything(masks: GrammarMasks) -> None:
    begin(masks, "a", "free")
    assert one(masks) == MadeMask(request_id="a", mask=None)


@pytest.mark.parametrize("text", ["bad", "panic"])
def test_a_failure_is_told_and_others_go_on(masks: GrammarMasks, text: str) -> None:
    begin(masks, "wrong", text)
    made = one(masks)
    assert made.error and made.request_id == "wrong" and made.code == (INVALID_GRAMMAR if text == "bad" else None)
    masks.close("wrong")
    begin(masks, "right")
    assert one(masks).mask == b"\0\1"
    masks.advance("right", [7], may_end=True)
    made = one(masks)
    assert (made.error, made.code) == ("token 7 is not allowed here", None)


def test_a_text_that_its_own_grammar_leads_to_a_dead_end_is_to_blame(masks: GrammarMasks) -> None:
    begin(masks, "a", "stuck")
    assert one(masks).mask == b"\0\1"
    masks.advance("a", [0], may_end=True)
    made = one(masks)
    assert made.code == GRAMMAR_STUCK and made.error is not None
    assert made.error.endswith("as its grammar demands: no token comes next")


def test_the_loop_waits_once_for_each_and_never_for_a_compilation(masks: GrammarMasks, gate: threading.Event) -> None:
    begin(masks, "slow", "wait")
    assert masks.collect(WAIT_S) == []  # a new grammar is not waited for
    gate.set()
    assert one(masks).request_id == "slow"
    gate.clear()
    masks.advance("slow", [0], may_end=True)
    assert masks.collect(0.001) == [] and masks.collect(WAIT_S) == []  # waited for once
    gate.set()
    assert one(masks).mask == b"\1\1"
    masks.advance("slow", [1], may_end=True)
    assert masks.collect(WAIT_S) == [MadeMask(request_id="slow", mask=b"\2\1")]


def test_no_mask_waits_for_the_grammars_of_newcomers(masks: GrammarMasks, gate: threading.Event) -> None:
    begin(masks, "old")
    assert one(masks).mask == b"\0\1"
    for number in range(8):  # more than there are threads, none of which comes back
        begin(masks, f"new{number}", "wait")
    for token in range(2):
        masks.advance("old", [token], may_end=True)
        assert masks.collect(WAIT_S) == [MadeMask(request_id="old", mask=bytes([token + 1, 1]))]
    gate.set()
    names: set[str] = set()
    while masks.num_pending:
        names |= {made.request_id for made in masks.collect(WAIT_S, for_any=True)}
    assert names == {f"new{number}" for number in range(8)}


def test_what_is_made_for_a_closed_request_is_dropped(masks: GrammarMasks, gate: threading.Event) -> None:
    begin(masks, "a", "wait")
    masks.close("a")
    begin(masks, "a")  # the same name again is another request
    assert one(masks) == MadeMask(request_id="a", mask=b"\0\1")
    gate.set()
    begin(masks, "b")
    assert one(masks).request_id == "b"


def test_who_takes_for_ever_is_given_up_and_replaced(
    masks: GrammarMasks, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):  # both threads
        begin(masks, name, "wait")
    begin(masks, "c")
    while sum(job.started > 0 for job in masks._pending.values()) < 2:
        threading.Event().wait(0.001)
    monkeypatch.setattr(grammar_masks, "PATIENCE_S", -1.0)
    given_up = masks.collect()
    monkeypatch.setattr(grammar_masks, "PATIENCE_S", 60.0)
    assert {made.request_id for made in given_up} == {"a", "b"} and all(made.error for made in given_up)
    begin(masks, "d")
    names = {one(masks).request_id}
    names |= {made.request_id for made in masks.collect(WAIT_S, for_any=True)}
    assert names == {"c", "d"}


def test_matchers_of_a_model_know_its_end_tokens_and_its_thinking(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path, "byte_level"))
    make = grammar_matchers(tokenizer, tokenizer.vocab_size + 70, [tokenizer.vocab_size + 69])
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    plain = make(StructuredSpec(kind="regex", text="a+"))
    plain.accept(letter)
    assert allowed(plain.mask()) == {"a", tokenizer.vocab_size + 69}
    fields = {"thinking_start": "<s>", "thinking_end": "</s>"}
    either = make(StructuredSpec(kind="regex", text="a", **fields))
    assert tokenizer.bos_token_id is not None and tokenizer.eos_token_id is not None
    assert allowed(either.mask()) == {"a", tokenizer.bos_token_id}
    within = make(StructuredSpec(kind="regex", text="a", thinking=True, **fields))
    assert within.mask() is None
    within.accept(tokenizer.eos_token_id)
    assert allowed(within.mask()) == {"a"}
    with pytest.raises(ValueError, match="no text fulfils it"):
        make(StructuredSpec(kind="regex", text=r"[^\s\S]"))


def allowed(mask: bytes | None) -> set[int | str]:
    """Return which ids a mask allows, the letters among them as such."""
    assert mask is not None
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, "u1"), bitorder="little")).tolist()
    letter = small_tokenizers.byte_level().token_to_id("a")
    return {"a" if token == letter else token for token in ids}
