"""Recording: what routers chose comes out whole, by phase; the commands write what they were asked, tell mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moewe.models.families import load_config
from moewe.moe.wide_ep.balancing import read_load
from moewe.moe.wide_ep.traces import load_trace
from moewe.runtime.options import engine_config
from moewe.runtime.params import SamplingParams
from moewe.runtime.ranks.routing_log import RoutingLog
from moewe.runtime.recording import record_routing
from moewe.server.cli.main import main
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, greedy
from tests.support.native import needs_native
from tests.support.setups import Setup

PROMPTS = [random_prompt(length, seed=length) for length in (19, 4)]


def config(**options: Any) -> Any:
    path = str(checkpoint("T-QW3", dtype=options.get("dtype", "float32")))
    fixed = {"skip_tokenizer_init": True, "num_blocks": 64, "max_model_len": 128, "threads": 1}
    return engine_config({"model": "T-QW3", "path": path, **fixed, **options})


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
def test_every_choice_of_every_token_is_kept(dtype: str) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    trace = record_routing(config(dtype=dtype), PROMPTS, params, most_tokens=1000)
    model = load_config(checkpoint("T-QW3"))
    assert model.moe is not None
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (
        len(model.moe_layers), model.moe.routing.num_experts, model.moe.routing.top_k,
    )  # fmt: skip
    assert trace.num_tokens("prefill") == 19 + 4 and trace.num_tokens("decode") == 2 * 5
    with Group(checkpoint("T-QW3", dtype=dtype), Setup(dtype=dtype)) as group:
        for i, prompt in enumerate(PROMPTS):
            group.submit(str(i), prompt, greedy(6))
        group.run()
        counted = group.rows_per_expert()
    np.testing.assert_array_equal(trace.load("prefill") + trace.load("decode"), counted)


def test_logs_are_bounded_and_forget_steps_that_do_not_count() -> None:
    log = RoutingLog(1, 4, most_tokens=3)
    log.observe(0, torch.tensor([[0], [1]]))
    log.end_step(0, keep=False)
    log.end_step(0, keep=True)  # nothing ran
    with pytest.raises(ValueError, match="ids must be of phases"):
        log.trace()
    reused = torch.tensor([[2], [3]])
    for _ in range(2):
        log.observe(0, reused)
        log.end_step(1, keep=True)
    reused[:] = 0
    trace = log.trace()
    assert trace.ids["decode"][0, :, 0].tolist() == [2, 2] and trace.ids["prefill"][0, :, 0].tolist() == [3, 3]
    for _ in range(2):
        log.observe(0, torch.tensor([[1]]))
        log.end_step(1, keep=True)
    assert log.dropped == 1 and log.trace().num_tokens("decode") == 3


def test_dense_models_are_refused() -> None:
    path = str(checkpoint("T-LLA"))
    with pytest.raises(ValueError, match="dense"):
        record_routing(
            engine_config({"model": "T-LLA", "path": path}), PROMPTS, SamplingParams(max_tokens=1), most_tokens=1
        )


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_replay_prints_tables_and_writes_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moewe.moe.wide_ep.synthetic import zipf
    from moewe.moe.wide_ep.traces import RoutingTrace, save_trace

    trace, load = str(tmp_path / "t.npz"), str(tmp_path / "l.json")
    ids = np.stack([zipf(512, 16, 2, seed=seed) for seed in range(2)])
    save_trace(RoutingTrace(num_experts=16, ids={"prefill": ids}), Path(trace))
    assert run("replay", "--trace", trace, "--topology", "EP4DP1[red=4,domains=2+2]", "--load", load) == 0
    told = capsys.readouterr().out
    assert "512 of prefill; 2 MoE layers, 16 experts, top-2" in told
    assert "layer 1" in told and "all layers" in told and "static" in told
    expected = load_trace(Path(trace)).load("prefill")
    np.testing.assert_array_equal(read_load(Path(load), num_layers=2, num_experts=16).total, expected)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["record", "demo"], "no --prompts is given"),
        (["record", "demo", "--prompts", "{empty}"], "has no prompt"),
        (["record", "demo", "--prompts", "{empty}", "--max-tokens", "0"], "--max-tokens 0 is not allowed"),
        (["replay"], "no --trace is given"),
        (["replay", "--trace", "{empty}"], "is not an .npz file"),
        (["replay", "--trace", "{empty}", "--row-bytes", "0"], "--row-bytes 0 is not allowed"),
        (["replay", "--trace", "/nowhere.npz"], "No such file"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    assert run(*[word.replace("{empty}", str(tmp_path / "empty")) for word in words]) == 1
    told = capsys.readouterr().err
    assert complaint in told and len(told.splitlines()) == 1
