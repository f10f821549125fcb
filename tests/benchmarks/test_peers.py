"""benchmarks/peers.py without a peer: rates, ratios, arguments, and workers that die, hang or answer nonsense.

Not how fast anything is, and none of the runtimes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
ECHO = "import json, sys\nfor line in sys.stdin: print(json.dumps({'got': json.loads(line)}), flush=True)"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # the scripts import each other as neighbours
    import peers

    return peers


def worker(peers: ModuleType, code: str) -> Any:
    return peers.Worker("peer/int8", [sys.executable, "-c", code], {}, 60)


def test_a_decode_rate_counts_what_follows_the_first_token(peers: ModuleType) -> None:
    assert peers.decode_rate(4, 11, 2.0, 7.0) == 8.0


def test_ratios_are_of_medians_and_stand_beside_the_wanted_ones(peers: ModuleType) -> None:
    rates = {"moewe": [90.0, 100.0, 500.0], "llamacpp": [10.0, 50.0, 60.0], "openvino": [50.0]}
    found = peers.ratios(rates, "d16", "int8")
    assert (found["llamacpp"]["ratio"], found["llamacpp"]["wanted"]) == (2.0, 5.0)
    assert (found["openvino"]["ratio"], found["openvino"]["min"]) == (2.0, 50.0)
    line = peers.shown("d16", found)
    assert "moewe 100.0 [90.0, 500.0]" in line and "x2.00 (wanted 5: SHORT)" in line
    assert "wanted" not in peers.shown("d4", peers.ratios(rates, "d4", "int8")), "nothing was aimed at for d4"


def test_every_wanted_ratio_is_to_a_peer_of_that_column(peers: ModuleType) -> None:
    for (measure, weights), wanted in peers.WANTED.items():
        assert peers.measure_name(measure) == measure
        assert set(wanted) <= set(peers.COLUMNS[weights])


@pytest.mark.parametrize("text", ["pp", "d0", "d33", "pp640", "x4", "d4x"])
def test_measures_without_room_are_refused(peers: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        peers.measure_name(text)


def test_peers_are_named_with_their_python(peers: ModuleType) -> None:
    assert peers.peer_python(f"vllm={sys.executable}") == ("vllm", sys.executable)
    with pytest.raises(argparse.ArgumentTypeError, match="names no peer"):
        peers.peer_python(f"vlm={sys.executable}")
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be run"):
        peers.peer_python("vllm=/nowhere/python")


def test_a_worker_answers_sleeps_and_ends(peers: ModuleType) -> None:
    echo = worker(peers, ECHO)
    process = psutil.Process(echo._process.pid)
    with echo.awake():
        assert echo.ask({"n": 1}, "a test") == {"got": {"n": 1}}
        assert process.status() != psutil.STATUS_STOPPED
    for _ in range(1000):
        if process.status() == psutil.STATUS_STOPPED:
            break
        time.sleep(0.01)
    assert process.status() == psutil.STATUS_STOPPED
    assert echo.memory_mib() > 0
    echo.end()
    assert echo._process.returncode == 0
    echo.kill()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; input(); print('out of memory', file=sys.stderr); sys.exit(3)", "exit code 3 .*: out of memory"),
        ("import os; input(); os.kill(os.getpid(), 4)", "signal SIGILL while a test; nothing on its stderr"),
        ("input(); print('hello'); input()", "'hello' instead of JSON"),
        ("input(); print('[]'); input()", "instead of an object"),
    ],
)
def test_a_worker_that_fails_says_how_in_one_line(peers: ModuleType, code: str, said: str) -> None:
    lost = worker(peers, code)
    with pytest.raises(peers.Lost, match=f"^peer/int8: .*{said}") as error:
        lost.ask({}, "a test")
    assert "\n" not in str(error.value)
    lost.kill()


def test_a_worker_that_hangs_is_killed_with_its_children(peers: ModuleType) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0)\n"
        "input(); print('{\"child\": %d}' % child.pid, flush=True)\n"
        "input(); input()"
    )
    hung = worker(peers, code)
    child = hung.ask({}, "starting")["child"]
    hung._limit_s = 0.1
    with pytest.raises(peers.Lost, match=r"no answer within 0.1 s \(--limit-s\) while a test; nothing on its stderr"):
        hung.ask({}, "a test")
    assert psutil.pid_exists(child)
    hung.kill()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_wrong_number_of_tokens_loses_the_peer(peers: ModuleType) -> None:
    short = worker(peers, """input(); print('{"tokens": [[1, 2], [3]], "seconds": 1}'); input()""")
    with pytest.raises(peers.Lost, match=r"gave \[2, 1\] tokens for 2 prompts, asked for 2 each"):
        peers.Side("vllm", short, 2).generate([[5], [6]], 2, "a test")
    short.kill()
