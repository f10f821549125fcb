"""The README's promise: `moewe serve demo --topology EP2DP1` answers plain questions in English, streamed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from moewe.models.demo import ensure_demo_checkpoint
from tests.support.server_process import NAME, ServerProcess

pytestmark = pytest.mark.spawn

# What a model of 135 M parameters can be held to: the first two words are facts, the others must be on the subject.
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the opposite of hot?": "cold",
    "What do plants need to grow?": "light|water|soil",
    "What is a dog?": "dog",
    "What is water made of?": "hydrogen",
}
MARKS = dict.fromkeys(list(QUESTIONS)[2:], pytest.mark.slow)
SENTENCE = re.compile(r"[A-Z][^.!?]{8,}[.!?]")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    ensure_demo_checkpoint()
    with ServerProcess("demo", "--price-per-hour", "3.6", topology="EP2DP1") as found:
        yield found


@pytest.mark.parametrize("question", [pytest.param(q, marks=MARKS.get(q, ())) for q in QUESTIONS])
def test_demo_answers_in_sentences(server: ServerProcess, question: str) -> None:
    stream = server.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": question}], stream=True, temperature=0, max_tokens=48
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    answer = "".join(pieces)
    assert sum(map(bool, pieces)) > 3, "it was meant to come piece by piece"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert re.search(QUESTIONS[question], answer), answer
    assert SENTENCE.match(answer), answer
    assert answer.isascii() and "<|" not in answer


def test_demo_metrics_show_both_ranks_and_a_saturation(server: ServerProcess) -> None:
    server.client().completions.create(model=NAME, prompt="The gull is", max_tokens=24, temperature=0)
    server.wait_idle(within=5.0)
    text = httpx.get(f"{server.url}/metrics").text
    for rank in (0, 1):
        ratios = re.findall(rf'^moewe_memory_saturation_ratio{{.*rank="{rank}".*}} (\S+)$', text, re.MULTILINE)
        assert any(float(ratio) > 0 for ratio in ratios), text
    counters = server.counters()
    assert counters["moewe_generation_tokens_total"] > 0
    assert counters["moewe_expert_tokens_total"] > 0
    cost = {
        kind: float(found)
        for kind, found in re.findall(r'^moewe_cost_per_million_tokens{tokens="(\w+)"} (\S+)$', text, re.M)
    }
    paid = float(re.findall(r"^moewe_cost_total (\S+)$", text, re.MULTILINE)[0])
    assert paid > 0 and cost["output"] == pytest.approx(1e6 * paid / counters["moewe_generation_tokens_total"])
    assert cost["all"] < min(cost["prompt"], cost["output"])
