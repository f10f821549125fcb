"""`moewe plan` as a command: what it prints, JSON with sources, and mistakes in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moewe.models.families import load_config
from moewe.moe.wide_ep.balancing.load_file import ExpertLoad, write_load
from moewe.server.cli import main as cli
from moewe.server.plan import inputs
from moewe.topologies.exchange_cost import ExchangeCost, LayoutLink
from moewe.topologies.planner.hardware import FIGURES, local_host
from tests.support.fixtures import checkpoint, copy_checkpoint


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", *words])
    out, err = capfd.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, out, err


def record(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capfd, *words, "--json")
    assert (code, err) == (0, "")
    read = json.loads(out)
    assert isinstance(read, dict)
    return read


WIDE = (
    "deepseek-v3", "--topology", "EP64DP3", "--hardware", "gb200-nvl72", "--weights", "nvfp4",
    "--kv-cache-dtype", "fp8", "--workload", "isl=4096,osl=1024,concurrency=3072",
)  # fmt: skip


def test_a_plan_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, *WIDE, "--price", "4")
    assert (code, err) == (0, "")
    for words in (
        "EP64DP3[adp=64,atp=1,red=0]", "3 replicas x 64 GPUs", "256 slots over 64 ranks: evenly",
        "each on 8 ranks of its own", "domain 2",
        "ranks 0..63: slots 0..255, 4 each", "bytes of the fullest rank", "routed experts (4 of 256 a layer)",
        "KV cache", "exchange buffers", "vllm serve", "sglang.launch_server", "trtllm-serve", "a step of", "exchange",
        "launch", "time to the first token", "output tokens / all GPUs",
        "input and output tokens, prefix hits included", "a million output tokens", "J an output token",
    ):  # fmt: skip
        assert words in out, words


def test_a_plan_as_json_has_sources_and_adds_up(capfd: pytest.CaptureFixture[str]) -> None:
    plan = record(capfd, *WIDE)
    assert all(figure["source"] for figure in plan["hardware"]["figures"].values())
    step = plan["decode_step"]
    assert sum(part["seconds"] for part in step["parts"]) - step["hidden_seconds"] == pytest.approx(step["seconds"])
    attention = next(part for part in step["parts"] if part["name"] == "attention weights")
    # Of bf16 products GB200 does 2.5e15 a second, and reaches 0.6 of them.
    assert attention["compute_seconds"] == pytest.approx(attention["flops"] / 1.5e15)
    assert step["compute_seconds"] == pytest.approx(sum(part["compute_seconds"] for part in step["parts"]))
    said = plan["settings"]
    assert (said["weights"], said["kv_cache_dtype"], said["popularity"]) == (["nvfp4"], "fp8", "uniform")
    assert said["watts_of_gpu"] == 1200 and said["price_of_gpu_hour"] is None
    budget = plan["pools"]["serve"]["budget"]
    assert sum(line["bytes"] for line in budget["lines"]) == budget["total_bytes"] <= budget["rank_memory_bytes"]
    served = plan["served"]
    assert {(rate["numerator"], rate["denominator"]) for rate in served["rates"]} >= {("output tokens", "all GPUs")}
    assert served["price_per_million_output_tokens"] is None and served["joules_per_output_token"] > 0


def test_a_recorded_load_makes_ranks_uneven(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    load = np.ones((32, 8), np.int64)
    load[:, 0] = 9
    write_load(ExpertLoad(phases={"decode": load}), path)
    words = ("mixtral-8x7b", "--topology", "EP4DP1", "--popularity")
    late = [
        next(
            part["seconds"]
            for part in record(capfd, *words, how)["decode_step"]["parts"]
            if part["name"] == "imbalance"
        )
        for how in ("uniform", str(path))
    ]
    assert late[1] > late[0]
    code, _, err = run(capfd, "qwen3-30b-a3b", "--popularity", str(path))
    assert code == 1 and "num_layers=32, but the model has 48" in err


def test_this_host_takes_for_an_exchange_what_was_measured_of_that_layout(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[LayoutLink] = []
    monkeypatch.setattr(inputs, "recall", lambda device: tuple(known) if device == "cpu" else ())
    host = local_host(cores=4, memory_bytes=1e10, memory_bandwidth=1e10, bf16_flops=1e12, int8_flops=0.0)
    monkeypatch.setattr(inputs, "local_hardware", lambda: host)
    words = (str(checkpoint("T-MIX")), "--topology", "EP2DP1", "--hardware", "local", "--workload", "isl=16,osl=16")
    before = record(capfd, *words)
    assert before["measured_exchange"] is None
    cost = ExchangeCost(name="shm", fixed_s=0.25, within_s=1e-9, between_s=0.0)
    known += [
        LayoutLink(topology=of, cost=each) for of, each in (("EP2DP1", cost), ("EP4DP1", replace(cost, fixed_s=9.0)))
    ]  # the newest is of another layout
    after = record(capfd, *words)
    parts = {part["name"]: part["seconds"] for part in after["decode_step"]["parts"]}
    layers = load_config(checkpoint("T-MIX")).num_layers
    assert parts["exchange"] == pytest.approx(0.25 * layers, rel=1e-3)
    assert after["measured_exchange"].startswith("shm takes 250.00 ms a layer")
    wider = record(capfd, words[0], "--topology", "EP4DP1", *words[3:])
    assert wider["measured_exchange"].startswith("shm takes 9000.00 ms a layer")


def test_every_figure_of_this_host_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "measure_matrix_rate", lambda cores: None)
    monkeypatch.setattr(inputs, "measure_read_bandwidth", lambda *limits: SimpleNamespace(bytes_per_second=1e10))
    host = inputs.local_hardware()
    sources = dict(host.sources)
    assert set(sources) == {name for name in FIGURES if getattr(host, name)}
    assert (sources["memory_bandwidth"], sources["bf16_flops"]) == ("measured now", "assumed")


def test_pools_for_prompts_and_for_decoding(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*WIDE[:2], "prefill: EP8DP4 | decode: EP64DP1", *WIDE[3:]]
    plan = record(capfd, *words)
    assert list(plan["pools"]) == ["prefill", "decode"] and plan["served"]["num_gpus"] == 96
    code, out, _ = run(capfd, *words)
    assert code == 0 and "pool prefill" in out and "pool decode" in out


SEARCH = ("qwen3-30b-a3b", "--search", "--gpus", "8", "--workload", "isl=2000,osl=500", "--weights", "bf16,fp8")


@pytest.mark.slow
def test_a_front_as_a_picture(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "front.png"
    code, out, _ = run(capfd, *SEARCH, "--plot", str(picture))
    assert code == 0 and "Pareto front" in out and picture.read_bytes().startswith(b"\x89PNG")


def test_a_search_in_words_and_json(capfd: pytest.CaptureFixture[str]) -> None:
    found = record(capfd, *SEARCH, "--top", "5", "--max-tpot", "20")
    rates = [point["rates"][1]["tokens_per_second"] for point in found["best"]]
    assert len(rates) == 5 and rates == sorted(rates, reverse=True)
    assert all(point["tpot_seconds"] <= 0.02 for point in [*found["best"], *found["front"]])
    assert {point["weights"] for point in found["front"]} <= {"bf16", "fp8"}
    assert found["best"][0]["rates"][1]["denominator"] == "all GPUs that there are"
    code, out, err = run(capfd, *SEARCH, "--max-tpot", "20", "--price", "2")
    assert (code, err) == (0, "") and "Pareto front" in out and "a million" in out and "TPOT <= 20 ms" in out
    code, out, _ = run(capfd, *SEARCH, "--max-tpot", "0.001")
    assert code == 0 and "no layout is within the targets" in out


def test_a_folder_with_and_without_weights(capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy_checkpoint(checkpoint("T-QW3"))
    load = ("--topology", "EP2DP1", "--workload", "isl=20,osl=10,concurrency=4")
    whole = record(capfd, str(folder), *load)
    assert "headers of 1 safetensors" in whole["model"]["facts_from"]
    for file in folder.glob("*.safetensors"):
        file.unlink()
    bare = record(capfd, str(folder), *load)
    assert "no weights" in bare["model"]["facts_from"] and bare["pools"] == whole["pools"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no MODEL is given"),
        (["gpt-5"], "the table has deepseek-v3"),
        (["deepseek-v3", "--topology", "EP256DP4096"], "has 1,048,576 ranks; a plan takes up to 65,536"),
        (["deepseek-v3", "--topology", "EP123456789DP1"], "123456789 is not a number of ranks"),
        (["mixtral-8x7b", "--hardware", "h300"], "did you mean"),
        (["mixtral-8x7b", "--topology", "EP64DP3"], "use EP8DP1"),
        (["mixtral-8x7b", "--topology", "EP1DP1", "--hardware", "a100"], "use EP2DP1"),
        (["mixtral-8x7b", "--topology", "a: EP2DP1 | b: EP2DP1"], "prefill: .. | decode: .."),
        (["mixtral-8x7b", "--workload", "isl=0"], "isl=0 must be a whole number"),
        (["mixtral-8x7b", "--weights", "int2"], "use one of: checkpoint"),
        (["mixtral-8x7b", "--kv-cache-dtype", "fp4"], "--kv-cache-dtype"),
        (["mixtral-8x7b", "--popularity", "hot"], "use uniform or zipf"),
        (["mixtral-8x7b", "--gpus", "8"], "--gpus is for a search; add --search"),
        (["mixtral-8x7b", "--weights", "bf16,fp8"], "which takes --search"),
        (["mixtral-8x7b", "--search", "--topology", "EP2DP1"], "leave one out"),
        (["mixtral-8x7b", "--search", "--gpus", "0"], "--gpus 0 is not allowed"),
        (["mixtral-8x7b", "--search", "--max-tpot", "0"], "--max-tpot 0 is not allowed"),
        (["mixtral-8x7b", "--search", "--plot", "front.doc"], "--plot 'front.doc'"),
        (["mixtral-8x7b", "--search", "--top", "0"], "--top 0 is not allowed"),
        (["deepseek-v3", "--search", "--gpus", "2"], "no layout of 2 GPUs fits"),
        (["mixtral-8x7b", "--price", "-1"], "--price -1 is not allowed"),
        (["mixtral-8x7b", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5"),
        (["mixtral-8x7b", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0"),
    ],
)
def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    code, out, err = run(capfd, *words)
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and says in err, err


def test_a_published_model_has_its_name_in_any_case_and_with_its_owner(capfd: pytest.CaptureFixture[str]) -> None:
    assert record(capfd, "deepseek-ai/DeepSeek-V3", "--topology", "EP32DP1")["model"]["name"] == "deepseek-v3"


@pytest.mark.parametrize("flag", ["--hardware", "--topology"])
def test_a_file_without_an_end_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    code, out, err = run(capfd, "deepseek-v3", flag, str(tmp_path / "endless.yaml"))
    assert code == 1 and not out and "is over 1,048,576 bytes" in err


def test_a_damaged_folder_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run(capfd, str(tmp_path))
    assert code == 1 and "model_type" in err


ONLY_HEADERS = """
import os, sys
from moewe.server.cli.main import main

preadv, read = os.preadv, []

def guarded(fd, buffers, offset):
    path = os.readlink(f"/proc/self/fd/{fd}")
    if path.endswith(".safetensors"):
        header = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        assert offset + sum(map(len, buffers)) <= header, f"weights of {path} are read at {offset}"
        read.append(path)
    return preadv(fd, buffers, offset)

os.preadv = guarded
load = ("--workload", "isl=20,osl=10,concurrency=4", "--json")
for words in (["--help"], ["deepseek-v3", "--topology", "EP32DP1", *load], [sys.argv[1], *load]):
    try:
        main(["plan", *words])
    except SystemExit as left:
        assert left.code == 0, words
assert read, "nothing read the header that the plan says it looked at"
sys.exit("torch is loaded" if "torch" in sys.modules else 0)
"""


def test_a_plan_reads_headers_only_and_does_without_torch() -> None:
    """Behind the header there is a hole, and whoever reads it is stopped."""
    folder = copy_checkpoint(checkpoint("T-QW3"))
    for file in folder.glob("*.safetensors"):
        whole = file.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        file.write_bytes(whole[:header])
        os.truncate(file, len(whole))
    done = subprocess.run(
        [sys.executable, "-c", ONLY_HEADERS, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0 and "--hardware" in done.stdout, done.stderr
