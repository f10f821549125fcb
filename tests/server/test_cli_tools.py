"""`moewe bench` and `moewe run-batch` as commands: help, mistakes, and what reaches the tools."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from moewe.server.bench import offline, online
from moewe.server.cli import main as cli
from moewe.server.cli import tools
from moewe.server.cli.tools import TOOLS
from moewe.server.flags.table import ALIASES


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    out, err = capfd.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, out, err


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from moewe.server.cli.main import main
for words in ("bench serve", "bench throughput", "run-batch"):
    try:
        main([*words.split(), "--help"])
    except SystemExit as left:
        heavy = [name for name in ("torch", "fastapi", "numpy", "aiohttp", "matplotlib") if name in sys.modules]
        if heavy or left.code:
            sys.exit(f"{words}: loaded {heavy}, code {left.code}")
    else:
        sys.exit(f"{words}: did not end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"moewe {words}" in done.stdout for words in ("bench serve", "bench throughput", "run-batch"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "serve", "--max-concurency", "3"], "did you mean --max-concurrency?"),
        (["bench", "serve", "surplus"], "'surplus' is more than this command takes"),
        (["bench", "serve", "--goodput", "ttft:5", "surplus"], "--goodput 'surplus' is not a target"),
        (["bench", "serve", "--num-prompts", "many"], "--num-prompts: 'many'"),
        (["bench", "serve", "--plot", "x.doc"], "--plot 'x.doc'"),
        (["bench", "latency"], "no MODEL is given"),
        (["bench", "latency", "m", "--batch-size", "0"], "--batch-size 0"),
        (["bench", "throughput", "m", "--dataset-name", "trace"], "--dataset-path"),
        (["bench", "nonsense"], "nonsense"),
        (["run-batch", "m"], "-i"),
        (["run-batch", "m", "-i", "nowhere", "-o", "x"], "'nowhere' is not a file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_one(
    capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    code, out, err = run(capfd, *words)
    assert code == 1 and out == ""
    assert says in err and err.startswith("moewe: error: ") and len(err.splitlines()) == 1


def test_values_reach_bench_serve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(online, "bench_serve", lambda tool: seen.append(tool) or 0)
    words = ["--base-url", "http://h:1", "--request-rate", "inf", "--goodput", "ttft:5", "tpot:6", "e2el:7",
             "--num-prompts", "9", "--ignore-eos", "--header", "a=b"]  # fmt: skip
    assert run(capfd, "bench", "serve", *words)[0] == 0
    assert seen == [{"base_url": "http://h:1", "request_rate": float("inf"), "goodput": ("ttft:5", "tpot:6", "e2el:7"),
                     "num_prompts": 9, "ignore_eos": True, "header": ("a=b",)}]  # fmt: skip


def test_engine_flags_and_tool_flags_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(offline, "bench_latency", lambda settings: seen.append(settings) or 0)
    words = ["m", "--topology", "EP2DP1", "--input-len", "5", "--seed", "4"]
    assert run(capfd, "bench", "latency", *words)[0] == 0
    assert seen[0].engine == {"model": "m", "topology": "EP2DP1", "seed": 4} and seen[0].tool == {"random_input_len": 5}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capfd, "bench", "serve")
    assert code == 1 and "aiohttp" in err and "pip install 'moewe[bench]'" in err


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: f"{tool.parent} {tool.name}")
def test_flags_of_a_tool_are_its_own_and_no_alias_hides_them(tool: tools.Tool) -> None:
    names = [flag.name for flag in tool.flags]
    assert len(names) == len(set(names))
    assert not {f"--{name}" for name in names} & set(ALIASES)
