"""Samples: lengths, seeds, shared prefixes, filters, and files that are not what they should be; times of arrival."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moewe.server.bench.arrivals import arrival_times
from moewe.server.bench.chosen import chosen_files, chosen_samples, dataset_name
from moewe.server.bench.datasets import FIRST_ID, Prompts, random_samples, sharegpt_samples, trace_samples
from tests.support.fake_replicas import tokenizer

IDS = Prompts(as_ids=True, vocab_size=500, seed=3)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


# --- random -----------------------------------------------------------------------------------------------------------
def test_random_ids_have_their_lengths_and_their_range() -> None:
    samples = random_samples(IDS, 50, (20, 10), range_ratio=0.5, prefix_len=4)
    assert all(len(s.prompt) == s.prompt_len and 14 <= s.prompt_len <= 34 for s in samples)
    assert {s.output_len for s in samples} <= set(range(5, 16)) and len({s.output_len for s in samples}) > 5
    assert len({tuple(s.prompt[:4]) for s in samples}) == 1 and len({tuple(s.prompt[4:8]) for s in samples}) == 50
    assert all(FIRST_ID <= token < 500 and type(token) is int for s in samples for token in s.prompt)


def test_without_a_range_all_lengths_are_equal() -> None:
    assert {(s.prompt_len, s.output_len) for s in random_samples(IDS, 9, (7, 3))} == {(7, 3)}


def test_a_seed_fixes_everything() -> None:
    again = Prompts(as_ids=True, vocab_size=500, seed=3)
    other = Prompts(as_ids=True, vocab_size=500, seed=4)
    first = random_samples(IDS, 5, (20, 10), range_ratio=0.9)
    assert first == random_samples(again, 5, (20, 10), range_ratio=0.9)
    assert first != random_samples(other, 5, (20, 10), range_ratio=0.9)


def test_text_has_a_word_a_token_or_the_exact_number_with_a_tokenizer() -> None:
    words = random_samples(Prompts(as_ids=False), 3, (12, 1))
    assert all(isinstance(s.prompt, str) and len(s.prompt.split()) == 12 for s in words)
    exact = Prompts(as_ids=False, vocab_size=200, tokenizer=tokenizer())
    for sample in random_samples(exact, 5, (12, 1)):
        assert isinstance(sample.prompt, str)
        assert abs(len(tokenizer().encode(sample.prompt, add_special_tokens=False)) - 12) <= 2


@pytest.mark.parametrize(
    ("lengths", "more", "flag"),
    [
        ((0, 1), {}, "--random-input-len"),
        ((1, 0), {}, "--random-output-len"),
        ((1, 1), {"prefix_len": -1}, "--random-prefix-len"),
        ((1, 1), {"range_ratio": 1.0}, "--random-range-ratio"),
    ],
)
def test_impossible_lengths_are_refused(lengths: tuple[int, int], more: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        random_samples(IDS, 1, lengths, **more)


# --- sharegpt ---------------------------------------------------------------------------------------------------------
def turns(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **more}


def test_conversations_are_filtered_and_counted(tmp_path: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "y" * 40}, {"role": "assistant", "content": "z" * 80}]}
    lonely = {"conversations": [{"from": "human", "value": "w" * 99}]}
    file = tmp_path / "s.json"
    file.write_text(json.dumps([
        turns("q" * 20, "a" * 24), messages, lonely, turns("hi", "a" * 24), turns("q" * 20, "no"),
        turns("q" * 5000, "a" * 24), turns("q" * 20, "a" * 9000), {"conversations": [None, None]}, 7,
    ]))  # fmt: skip
    samples = sharegpt_samples(Prompts(as_ids=False), file, 10)
    assert {(s.prompt, s.prompt_len, s.output_len) for s in samples} == {("q" * 20, 5, 6), ("y" * 40, 10, 20)}
    assert len(sharegpt_samples(Prompts(as_ids=False), file, 1)) == 1
    fixed = sharegpt_samples(Prompts(as_ids=False), file, 10, output_len=9)
    assert len(fixed) == 4 and {s.output_len for s in fixed} == {9}


@pytest.mark.parametrize(("text", "says"), [("{", "JSON"), ("{}", "list"), ("[]", "no conversation")])
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        sharegpt_samples(Prompts(as_ids=False), file, 1)
    with pytest.raises(ValueError, match="--dataset-path"):
        sharegpt_samples(Prompts(as_ids=False), tmp_path / "nowhere", 1)


# --- trace ------------------------------------------------------------------------------------------------------------
def line(at: float, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": output, **more}


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl",
        line(7000, 10, 4, hash_ids=[1, 2, 3]), line(6000, 8, 0, hash_ids=[1, 2]), line(9000, 9, 5, hash_ids=[1, 9]),
        line(9500, 3, 2),
    )  # fmt: skip
    samples = trace_samples(IDS, file, None, speed=2.0, block_size=4)
    assert [s.arrival for s in samples] == [0.0, 0.5, 1.5, 1.75]
    assert [(s.prompt_len, len(s.prompt), s.output_len) for s in samples] == [
        (8, 8, 1),
        (10, 10, 4),
        (9, 9, 5),
        (3, 3, 2),
    ]
    first, second, third, _ = (s.prompt for s in samples)
    assert second[:8] == first and third[:4] == first[:4] and third[4:8] != first[4:8]
    assert len(trace_samples(IDS, file, 2, block_size=4)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "JSON lines"),
        ("[1]", "no object"),
        ('{"timestamp": 1}', "line 1"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1}', "as numbers"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length=0"),
        ("", "no request"),
    ],
)
def test_other_traces_are_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        trace_samples(IDS, file, None)


# --- choosing ---------------------------------------------------------------------------------------------------------
def test_flags_of_another_data_set_are_refused() -> None:
    with pytest.raises(ValueError, match="--trace-speed says nothing about --dataset-name random"):
        dataset_name({"trace_speed": 2.0})
    with pytest.raises(ValueError, match="--dataset-name trace needs the file"):
        dataset_name({"dataset_name": "trace"})
    with pytest.raises(ValueError, match="random, sharegpt, trace"):
        dataset_name({"dataset_name": "sonnet"})
    with pytest.raises(ValueError, match="--num-prompts 0"):
        chosen_samples({"num_prompts": 0}, IDS)
    assert len(chosen_samples({"num_prompts": 3, "random_input_len": 2, "random_output_len": 1}, IDS)) == 3


def test_places_to_write_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--output-json"):
        chosen_files({"output_json": str(tmp_path / "no" / "x.json")})
    with pytest.raises(ValueError, match=r"\.png"):
        chosen_files({"plot": str(tmp_path / "x.doc")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"moewe\[bench\]"):
        chosen_files({"plot": str(tmp_path / "x.png")})


# --- arrivals ---------------------------------------------------------------------------------------------------------
def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(4, math.inf) == [0.0] * 4 and arrival_times(0, 5.0) == []


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_their_mean_and_spread(burstiness: float) -> None:
    times = arrival_times(20001, 50.0, burstiness=burstiness, seed=1)
    gaps = np.diff(times).tolist()
    assert times[0] == 0.0 and min(gaps) >= 0 and times == arrival_times(20001, 50.0, burstiness=burstiness, seed=1)
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.08)


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_impossible_paces_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match=r"--(request-rate|burstiness)"):
        arrival_times(3, rate, burstiness=burstiness)
