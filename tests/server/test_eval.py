"""`moewe eval`: scores by hand, needles where they belong, and the command on a model whose answers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from moewe.models.demo import ensure_demo_checkpoint
from moewe.runtime.messages import Delta, LogprobEntry
from moewe.server.cli.main import main
from moewe.server.eval.command import ANSWER_TOKENS, _ask, _table, against, windows
from moewe.server.eval.needles import DEPTHS, Needle, found, make_needles
from moewe.server.eval.scores import Place, agreement, divergence, perplexity, place_of
from moewe.server.flags.values import Settings
from tests.support.fixtures import reference_logits, reference_model


def entry(token: int, logprob: float, rank: int) -> LogprobEntry:
    return LogprobEntry(token_id=token, logprob=logprob, rank=rank, decoded_token=None)


def test_a_place_has_its_own_token_and_the_likeliest_first() -> None:
    place = place_of((entry(7, -3.0, 3), entry(5, -0.5, 1), entry(9, -1.0, 2)))
    assert place is not None and place.logprob == -3.0 and list(place.likely) == [5, 9, 7]
    assert place_of(()) is None


def test_perplexity_is_the_inverse_mean_probability() -> None:
    places = [Place(math.log(0.5), {}), Place(math.log(0.125), {})]
    assert perplexity(places) == pytest.approx(4.0)
    assert perplexity([Place(-math.inf, {})]) == math.inf


def test_agreement_counts_places() -> None:
    one = [Place(0.0, {1: math.log(0.75), 2: math.log(0.25)})] * 2
    two = [one[0], Place(0.0, {2: math.log(0.75), 1: math.log(0.25)})]
    near = agreement(one, two)
    assert near.top1 == 0.5 and near.num_places == 2
    assert near.kl == pytest.approx(0.5 * (0.75 * math.log(3) - 0.25 * math.log(3)))
    with pytest.raises(ValueError):
        agreement(one, two[:1])


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 12))
def test_the_bound_is_never_above_the_divergence(seed: int, size: int, shown: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.full(size, 0.5), size=2).clip(1e-9)
    p, q = p / p.sum(), q / q.sum()
    exact = float((p * np.log(p / q)).sum())

    def likely(values: np.ndarray) -> dict[int, float]:
        return {int(i): math.log(values[i]) for i in np.argsort(-values)[:shown]}

    bound = divergence(likely(p), likely(q))
    assert 0 <= bound <= exact + 1e-9
    if shown >= size:
        assert bound == pytest.approx(exact, abs=1e-9)


def test_windows_cover_a_text_once() -> None:
    assert windows([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert windows([1, 2, 3], 9) == [[1, 2, 3]] and windows([1], 9) == []


def spell(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_needles_stand_at_their_depth() -> None:
    hay = spell("." * 5000)
    needles = make_needles(hay, [300, 600], trials=2, encode=spell)
    assert len(needles) == 2 * len(DEPTHS) * 2
    for needle in needles:
        text = "".join(map(chr, needle.prompt))
        assert len(text) == needle.length and text.count(needle.answer) == 1
        fact = text.index(" The secret number")
        told = text[fact : text.index(". ", fact)]
        assert told.endswith(needle.answer) and text.rstrip().endswith("door is")
        assert text.rsplit("\n\n")[-1] == told[1 : told.index(" is ") + 3]
        hay_before, hay_all = fact, text.count(".") - 1
        assert hay_before == round(needle.depth * hay_all)
    assert make_needles(hay, [300], trials=2, encode=spell) == needles[: len(needles) // 2]


def test_needles_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="--needle 40 has no room"):
        make_needles(spell("." * 100), [40], trials=1, encode=spell)
    with pytest.raises(ValueError, match=r"--needle 500 wants a text of \d+ tokens, --text has 100"):
        make_needles(spell("." * 100), [500], trials=1, encode=spell)


@pytest.mark.parametrize(
    ("text", "right"), [(" 1234.", True), (" 12345", False), (" door 1234", True), ("", False), (" 99, 1234", False)]
)
def test_an_answer_is_the_first_number(text: str, right: bool) -> None:
    assert found(Needle(100, 0.5, (), "1234"), text) == right


class Answering:
    """A session that knows the numbers of some needles, and tells of all at once, the last first, in two pieces."""

    def __init__(self, right: list[bool], needles: list[Needle]) -> None:
        self.answers = {
            needle.prompt: f" {needle.answer}." if known else " 0."
            for needle, known in zip(needles, right, strict=True)
        }

    def stream(self, prompts: list[tuple[int, ...]], params: list[Any]) -> Iterator[tuple[int, Delta]]:
        assert {each.max_tokens for each in params} == {ANSWER_TOKENS} and len(params) == len(prompts)
        for piece, reason in (slice(0, 3), None), (slice(3, None), "length"):
            for index in reversed(range(len(prompts))):
                text = self.answers[prompts[index]][piece]
                yield index, Delta(request_id=str(index), text=text, finish_reason=reason)


def test_each_answer_counts_for_its_own_length_and_depth() -> None:
    needles = make_needles(spell("." * 5000), [300, 600], trials=2, encode=spell)
    shares = {300: (1.0, 0.0, 0.5, 0.0, 0.5), 600: (0.0, 0.5, 1.0, 1.0, 0.0)}
    right = [trial < share * 2 for length in shares for share in shares[length] for trial in range(2)]
    session: Any = Answering(right, needles)
    assert _table(needles, _ask(session, needles, lambda: None)) == [
        {"length": length, "found": dict(zip(("0.1", "0.3", "0.5", "0.7", "0.9"), of_length, strict=True))}
        for length, of_length in shares.items()
    ]


def test_the_other_run_differs_by_what_is_named_alone() -> None:
    settings = Settings(engine={"model": "m", "topology": "EP1DP1"}, http={}, sample={}, shared={}, tool={"text": "t"})
    other = against(settings, ["quantization=int8", "--kv_cache_dtype=fp8", "numa-bind=true", "topology=EP2DP1"])
    assert other.engine == {
        "model": "m", "topology": "EP2DP1", "quantization": "int8", "kv_cache_dtype": "fp8", "numa_bind": True,
    }  # fmt: skip
    assert other.tool == settings.tool and settings.engine == {"model": "m", "topology": "EP1DP1"}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no --text is given"),
        (("--text", "no-such-file"), "--text 'no-such-file' cannot be read: No such file or directory"),
        (("--text", __file__, "--context", "1"), "--context 1 is not allowed; use at least 2"),
        (("--text", __file__, "--needle", "many"), "--needle 'many' is no length"),
        (("--text", __file__, "--against", "int8"), "--against 'int8' is no setting"),
        (("--text", __file__, "--against", "colour=red"), "--against 'colour=red' is no setting"),
        (("--text", __file__, "--against", "max-num-seqs=x"), "--against max-num-seqs"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "demo", *words) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def perplexity_of_transformers(folder: Path, pieces: list[list[int]]) -> float:
    """Return what transformers finds in fp32 on the same tokens: exp of the mean loss of all tokens but the first."""
    losses = [
        torch.nn.functional.cross_entropy(
            reference_logits(folder, piece)[:-1], torch.tensor(piece[1:]), reduction="sum"
        )
        for piece in pieces
    ]
    return math.exp(float(sum(losses)) / sum(len(piece) - 1 for piece in pieces))


def found_by_transformers(folder: Path, needle: Needle, tokenizer: Tokenizer) -> bool:
    prompt = torch.tensor([needle.prompt])
    said = reference_model(folder).generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    return found(needle, tokenizer.decode(said[0, prompt.shape[1] :].tolist()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_is_read_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text.write_text("\n".join(page.read_text() for page in pages)[:12_000])
    out = tmp_path / "out.json"
    common = ["--text", str(text), "--context", "128", "--most-tokens", "300", "--max-model-len", "512",
              "--dtype", "float32", "--output-json", str(out)]  # fmt: skip
    assert run("eval", "demo", *common, "--against", "topology=EP2DP1", "--needle", "64", "--needle-trials", "1") == 0
    runs: dict[str, Any] = json.loads(out.read_text())
    assert runs["agreement"]["num_places"] == runs["model"]["num_tokens"] == 300 - 3  # the first token of each piece
    assert runs["agreement"]["top1"] > 0.99 and runs["agreement"]["kl"] < 1e-4
    assert runs["against"]["topology"].startswith("EP2DP1")
    assert runs["against"]["perplexity"] == pytest.approx(runs["model"]["perplexity"], rel=1e-3)
    folder = ensure_demo_checkpoint()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False).ids
    reference = perplexity_of_transformers(folder, windows(ids[:300], 128))
    assert runs["model"]["perplexity"] == pytest.approx(reference, rel=1e-4)
    needles = make_needles(
        ids, [64], trials=1, encode=lambda part: tokenizer.encode(part, add_special_tokens=False).ids
    )
    expected = {f"{each.depth:g}": float(found_by_transformers(folder, each, tokenizer)) for each in needles}
    for name in ("model", "against"):
        assert runs[name]["needles"] == [{"length": 64, "found": expected}]
    assert "same likeliest token at" in capsys.readouterr().out
