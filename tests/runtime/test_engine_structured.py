"""The engine with constrained requests: they keep to their grammar, end with it, and leave others alone."""

from __future__ import annotations

import numpy as np
import pytest

from moewe.runtime import engine as engine_module
from moewe.runtime.deltas import seed_sequence
from moewe.runtime.engine import BooksError, Engine
from moewe.runtime.grammar_masks import GrammarMasks
from moewe.runtime.messages import GRAMMAR_STUCK, INVALID_GRAMMAR, Submit
from moewe.runtime.params import SamplingParams, StructuredSpec
from moewe.runtime.plan import RankResult, StepResult, pack, unpack
from moewe.runtime.ranks.batch import WorkerBatch
from moewe.runtime.scheduler import Scheduler
from moewe.runtime.scheduling.limits import GroupLimits, SchedulerConfig
from moewe.runtime.text_output import Shown
from moewe.text.grammar import GrammarStuck

VOCAB, EOS = 64, 63
LIMITS = SchedulerConfig(
    num_ranks=2, groups=(GroupLimits(num_blocks=40),), block_size=4, max_model_len=64, max_num_seqs=4,
    max_num_batched_tokens=16, eos_token_ids=(EOS,),
)  # fmt: skip


class Letters:
    """The grammar of exactly the letters of `text`.

    `!` breaks it there, `#` lets nothing follow there, `+` lets the text end there or go on.
    """

    def __init__(self, text: str) -> None:
        if text == "refuse":
            raise ValueError("no text fulfils it")
        self.rest = [ord(letter) - 97 for letter in text.replace("+", "")]
        self.ends = len(text.partition("+")[0]) if "+" in text else None
        self.at = 0

    @property
    def finished(self) -> bool:
        return self.at == len(self.rest)

    def accept(self, token_id: int) -> None:
        assert token_id == self.rest[self.at]
        self.at += 1

    def mask(self, *, may_end: bool = True) -> bytes:
        if self.rest[self.at] < 0:
            raise GrammarStuck("no token comes next") if self.rest[self.at] == ord("#") - 97 else RuntimeError("broken")
        allowed = np.zeros(VOCAB, np.bool_)
        allowed[self.rest[self.at]] = True
        allowed[EOS] = self.ends == self.at and may_end
        return np.packbits(allowed, bitorder="little").tobytes()


class MaskedGroup:
    """Ranks in this thread: they take the highest token that their mask allows, token 50 without one."""

    def __init__(self) -> None:
        self.batches = [
            WorkerBatch(num_slots=LIMITS.max_num_seqs, max_model_len=LIMITS.max_model_len, block_size=LIMITS.block_size)
            for _ in range(LIMITS.num_ranks)
        ]
        self.results: list[StepResult] = []
        self.num_rows: list[int] = []

    @property
    def in_flight(self) -> int:
        return len(self.results)

    def submit(self, plan) -> None:
        ranks = tuple(map(self._run, self.batches, plan.ranks))
        self.num_rows.append(sum(rank.num_rows for rank in ranks))
        self.results.append(StepResult(step=plan.header.step, ranks=ranks))

    def _run(self, batch: WorkerBatch, plan) -> RankResult:
        batch.apply(plan)
        rows = batch.rows(plan.chunks, plan.held)
        words = {mask.slot: mask.words for mask in plan.masks}
        tokens = np.array([best(words.get(slot)) for slot in rows.sample_slots.tolist()], np.int64)
        done = batch.commit(rows, tokens, np.ones(batch.num_slots, np.bool_))
        return RankResult(
            step=0, slots=pack(rows.sample_slots), sequence_ids=pack(batch.sequence_ids[rows.sample_slots], "<i8"),
            tokens=pack(tokens[done.counts > 0]), counts=pack(done.counts), flags=pack(done.flags, "u1"),
            num_rows=rows.num_rows,
        )  # fmt: skip

    def collect(self, timeout=None):
        return self.results.pop(0)


def best(words: bytes | None) -> int:
    return 50 if words is None else int(np.flatnonzero(np.unpackbits(unpack(words, "u1"), bitorder="little")).max())


class Text:
    """Shows tokens as letters and holds the last one back until the end."""

    def __init__(self, params: SamplingParams) -> None:
        self.held = ""

    def add(self, token_ids, finish_reason):
        letters = [chr(97 + token) for token in token_ids]
        if finish_reason == "stop":
            letters.pop()
        text = self.held + "".join(letters)
        self.held = text[-1:] if finish_reason is None else ""
        return Shown(text[:-1] if finish_reason is None else text, None, len(token_ids))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(engine_module, "MASK_PATIENCE_S", 5.0)  # a busy machine must not change the counts
    return make(GrammarMasks(lambda spec: Letters(spec.text)))


def make(masks: GrammarMasks | None) -> Engine:
    return Engine(
        Scheduler(LIMITS), MaskedGroup(), make_text=Text, token_text=None, seeds=seed_sequence(0), masks=masks
    )


def submit(name: str, grammar: str | None, prompt: int = 5, **params) -> Submit:
    spec = None if grammar is None else StructuredSpec(kind="regex", text=grammar)
    return Submit(
        request_id=name,
        prompt_token_ids=pack(np.arange(prompt)),
        params=SamplingParams(temperature=0, structured=spec, **{"max_tokens": 20} | params),
    )


def run(engine: Engine) -> dict[str, tuple[str, str | None, str | None]]:
    """Return text, reason and error of all requests."""
    texts: dict[str, str] = {}
    ends: dict[str, tuple[str | None, str | None]] = {}
    for _ in range(5000):
        if not engine.has_work:
            break
        for delta in engine.step():
            assert delta.request_id not in ends, "goes on after its end"
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason, delta.error
        engine.scheduler.check_invariants()
    assert not engine.has_work and engine.settle(strict=True) == []
    assert engine._masks is None or not engine._masks.num_pending
    return {name: (texts[name], *end) for name, end in ends.items()}


def test_a_grammar_that_nobody_follows_is_noticed_when_idle_and_mended(engine: Engine) -> None:
    engine._masks.open("gone", StructuredSpec(kind="regex", text="hello"), may_end=True)
    with pytest.raises(BooksError, match="grammars of 1 requests"):
        engine.settle(strict=True)
    assert engine.settle() == []
    assert engine.settle(strict=True) == []


def test_a_text_ends_with_its_grammar(engine: Engine) -> None:
    engine.add(submit("a", "hello"))
    assert run(engine) == {"a": ("hello", "stop", None)}


def test_a_limit_cuts_it_off(engine: Engine) -> None:
    engine.add(submit("a", "hello", max_tokens=3))
    assert run(engine) == {"a": ("hel", "length", None)}


def test_a_request_for_no_tokens_gets_none(engine: Engine) -> None:
    engine.add(submit("none", "hello", max_tokens=0))
    engine.add(submit("one", "hello", max_tokens=1))
    assert run(engine) == {"none": ("", "length", None), "one": ("h", "length", None)}


def test_the_end_token_comes_where_the_grammar_lets_it(engine: Engine) -> None:
    engine.add(submit("early", "ab+cd"))
    engine.add(submit("ignoring", "ab+cd", ignore_eos=True))
    engine.add(submit("longer", "ab+cd", min_tokens=3))
    ends = run(engine)
    assert ends == {"early": ("ab", "stop", None), "ignoring": ("abcd", "stop", None), "longer": ("abcd", "stop", None)}


def test_free_requests_run_ahead_while_constrained_ones_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moewe.runtime.engine.MASK_PATIENCE_S", 5.0)  # a busy machine makes a mask late, not in vain
    engine.add(submit("bound", "abcdefghij"))
    engine.add(submit("free", None, max_tokens=20))
    ends = run(engine)
    assert ends["bound"] == ("abcdefghij", "stop", None)
    assert ends["free"] == (chr(97 + 50) * 20, "length", None)
    # Where masks come late, the free one is done first; then each token of the other costs two steps at most.
    assert engine.num_steps <= 20 + 2 * 10 + 4, "more than one step is lost for a token"


def test_many_of_both_kinds_come_through_with_few_blocks(engine: Engine) -> None:
    for number in range(24):
        text = "abcdefghijklmnopqrstuvwxyz"[: 1 + number]
        engine.add(submit(f"bound{number}", text, prompt=3 + number, max_tokens=30))
        engine.add(submit(f"free{number}", None, prompt=3 + number, max_tokens=1 + number))
    ends = run(engine)
    for number in range(24):
        assert ends[f"bound{number}"] == ("abcdefghijklmnopqrstuvwxyz"[: 1 + number], "stop", None)
        assert ends[f"free{number}"][1] == "length"


@pytest.mark.parametrize(("grammar", "code"), [("refuse", INVALID_GRAMMAR), ("ab#c", GRAMMAR_STUCK), ("ab!c", None)])
def test_a_failure_ends_its_request_only(engine: Engine, grammar: str, code: str | None) -> None:
    engine.add(submit("wrong", grammar))
    engine.add(submit("right", "xyz"))
    engine.add(submit("free", None))
    codes = {}
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    for delta in deltas:
        if delta.finish_reason is not None:
            codes[delta.request_id] = (delta.finish_reason, delta.error_code)
    assert codes == {"wrong": ("error", code), "right": ("stop", None), "free": ("length", None)}
    assert engine.settle(strict=True) == []


def test_an_aborted_request_is_forgotten(engine: Engine) -> None:
    engine.add(submit("a", "abcdefgh"))
    engine.add(submit("b", "abc"))
    engine.step()
    assert [delta.finish_reason for delta in engine.abort(("a",))] == ["abort"]
    assert run(engine) == {"b": ("abc", "stop", None)}


def test_a_second_request_of_the_same_name_disturbs_the_first_in_nothing(engine: Engine) -> None:
    engine.add(submit("a", "abcd"))
    refused = engine.add(submit("a", "xyz"))
    assert refused is not None and "already in use" in str(refused.error)
    assert run(engine) == {"a": ("abcd", "stop", None)}


def test_without_a_tokenizer_it_is_refused() -> None:
    engine = make(None)
    refused = engine.add(submit("a", "abc"))
    assert refused is not None and "tokenizer" in str(refused.error)
    assert not engine.has_work
