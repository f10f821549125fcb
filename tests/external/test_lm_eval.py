"""The server through lm-eval: log-likelihoods by echo and logprobs, and text until a stop, as evaluations ask them.

One request at a time: which one of two nearly equal tokens is greedy may depend on what else is in a step (bf16).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moewe.models.demo import ensure_demo_checkpoint
from moewe.text import load_tokenizer
from tests.external.conftest import HERE, python_with, run_client
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn]


def evaluate(server: ServerProcess, folder: Path, model: str, path: str, tasks: str, *flags: str) -> dict[str, Any]:
    """Run lm-eval and return its samples by task, in order of the documents."""
    options = f"model={NAME},base_url={server.url}/v1/{path},num_concurrent=1,max_retries=1,max_length=256"
    options += f",tokenizer={ensure_demo_checkpoint()},tokenizer_backend=huggingface"
    command = [python_with("lm_eval"), "-m", "lm_eval", "--model", model, "--model_args", options, "--tasks", tasks]
    command += ["--include_path", ".", "--log_samples", "--output_path", str(folder), *flags]
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    run_client(command, cwd=HERE / "tasks", env=os.environ | offline)
    samples = {}
    for task in tasks.split(","):
        (file,) = folder.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda line: line["doc_id"])
    return samples


def questions() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "tasks" / "birds.jsonl").read_text().splitlines()]


def likelihood(server: ServerProcess, question: str, choice: str) -> float:
    """The log-likelihood of `choice` by another way than lm-eval's: prompt_logprobs of token ids."""
    tokenizer = load_tokenizer(ensure_demo_checkpoint())
    before = tokenizer.encode(question, add_special_tokens=False)
    ids = tokenizer.encode(question + choice, add_special_tokens=False)
    answer = server.client().completions.create(
        model=NAME, prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    table = answer.choices[0].model_extra["prompt_logprobs"]
    return sum(table[place][str(ids[place])]["logprob"] for place in range(len(before), len(ids)))


def test_local_completions_scores_and_generates(server: ServerProcess, tmp_path: Path) -> None:
    samples = evaluate(server, tmp_path, "local-completions", "completions", "birds_choice,birds_text")
    for question, sample in zip(questions(), samples["birds_choice"], strict=True):
        found = [float(response[0][0]) for response in sample["resps"]]
        expected = [likelihood(server, question["question"], choice) for choice in question["choices"]]
        assert found == pytest.approx(expected, abs=1e-3)
        assert sample["acc"] == (expected.index(max(expected)) == question["answer"])
    for question, sample in zip(questions(), samples["birds_text"], strict=True):
        answer = server.client().completions.create(
            model=NAME, prompt=question["question"], max_tokens=16, temperature=0, stop=["."]
        )
        assert sample["resps"][0][0] == answer.choices[0].text


def test_local_chat_completions_generates(server: ServerProcess, tmp_path: Path) -> None:
    samples = evaluate(
        server, tmp_path, "local-chat-completions", "chat/completions", "birds_text", "--apply_chat_template"
    )
    for question, sample in zip(questions(), samples["birds_text"], strict=True):
        answer = server.client().chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": question["question"]}],
            max_tokens=16, temperature=0, stop=["."],
        )  # fmt: skip
        assert sample["resps"][0][0] == answer.choices[0].message.content
