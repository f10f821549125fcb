"""Is the advice right? Two emulated domains, a link that is slow or fast, and tokens/s before and after.

A server of random weights larger than all caches is kept busy until its advisor says to change the layout; then `moewe
apply` does that while requests go on, and the rate is measured again.
- slow: starts as EP4DP1 over a slowed link; groups inside the domains, EP2DP2, are faster.
- fast: starts as EP1DP2, a rank in each domain; one group over both reads each expert once, EP2DP1. What its exchanges
  take is measured by starting it once before, as `links.json` would know on a machine that it ran on.
Exit code 1 where something else is advised, or what is advised is not faster by 5 %. Both want a quiet machine.

    python benchmarks/advisor.py slow fast --seconds 60
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from readings import Client, busy, model, scrape, total
from telemetry_check import Server

from moewe.native.bandwidth import llc_bytes
from moewe.topologies import parse_topology

LAYERS, EXPERTS, TOP_K, WIDTH = 4, 16, 8, 1024
WINDOWS = 8  # after so many without an advice there will be none
SETTLE_S = 5.0
DIFFERS = 1.05


@dataclass(frozen=True)
class Scenario:
    """One machine and what is right on it.

    Attributes:
        start: the layout at first.
        domains: the two, as in `--domains`.
        expected: the layout that suits it.
        learn: a layout that is started once before, so that its exchanges are known.
    """

    start: str
    domains: str
    expected: str
    learn: str = ""


SLOW = "rate=20,delay=20000"  # MB/s and microseconds
SCENARIOS = {
    "slow": Scenario(f"EP4DP1[domains=2+2,{SLOW}]", f"2+2,{SLOW}", "EP2DP2", learn="EP2DP2"),
    "fast": Scenario("EP1DP2", "1+1", "EP2DP1", learn="EP2DP1[domains=1+1]"),
}


def over_the_caches(folder: Path) -> None:
    """Write the config of a model of few wide layers whose weights are 2.5 times the last-level caches."""
    ffn = max(1024, -(-5 * llc_bytes() // (2 * 3 * WIDTH * 2 * EXPERTS * LAYERS)))
    model(
        folder, hidden_size=WIDTH, moe_intermediate_size=-(-ffn // 64) * 64, num_hidden_layers=LAYERS,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K,
    )  # fmt: skip


def advice_of(url: str) -> dict[str, Any]:
    """Return what the advisor says now."""
    with urllib.request.urlopen(f"{url}/v1/topology/advice", timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def advised(url: str) -> dict[str, Any]:
    """Wait for an advice to change, or for the last window of those that may bring one; return what is said then."""
    while True:
        said = advice_of(url)
        if said["verdict"] == "change" or said["number"] >= WINDOWS:
            return said
        time.sleep(1.0)


def tokens_per_second(url: str, seconds: float) -> float:
    """Return the rate of generated tokens over a while."""
    name = "moewe_generation_tokens_total"
    before, began = total(scrape(url), name), time.perf_counter()
    time.sleep(seconds)
    return (total(scrape(url), name) - before) / (time.perf_counter() - began)


def step_seconds(said: dict[str, Any]) -> float:
    """Return the step that the layout which runs took in the last window."""
    return float(said["calibration"]["observed_s"]) if said["calibration"] else 0.0


def run(folder: Path, scenario: Scenario, args: argparse.Namespace) -> dict[str, Any]:
    """Return what was advised in a scenario, and what came of it."""
    flags = ["--load-format", "dummy", "--threads", str(args.threads), "--domains", scenario.domains]
    if scenario.learn:
        Server(folder, [*flags, "--topology", scenario.learn]).stop()
    flags += ["--topology", scenario.start, "--allow-apply", "--advice-interval", str(args.window)]
    if args.log is not None:
        flags += ["--advice-log", str(args.log)]
    server = Server(folder, flags)
    try:
        with busy(server.url, [Client(args.requests, max_tokens=64)]):
            said = advised(server.url)
            print(f"{scenario.start}: {said['verdict']}: {said['reason']}", flush=True)
            if said["verdict"] != "change":
                return {"advised": said["verdict"], "reason": said["reason"]}
            before = tokens_per_second(server.url, args.seconds)
            subprocess.run([sys.executable, "-m", "moewe", "apply", server.url], check=True)
            time.sleep(SETTLE_S)
            after = tokens_per_second(server.url, args.seconds)
            later = advised(server.url)
        print(f"{later['topology']}: {later['verdict']}: {later['reason']}", flush=True)
    finally:
        server.stop()
    return {
        "advised": parse_topology(said["advised"]).short(),
        "reason": said["reason"],
        "tokens_per_second_before": before,
        "tokens_per_second_after": after,
        "gain": after / before - 1,
        "gain_predicted": said["gain"],
        "step_s_before": step_seconds(said),
        "step_s_after": step_seconds(later),
        "verdict_after": later["verdict"],
        "reason_after": later["reason"],
    }


def is_right(found: dict[str, Any], scenario: Scenario) -> bool:
    """Tell whether the expected layout was advised, and is faster."""
    return bool(found["advised"] == scenario.expected and found.get("gain", 0.0) >= DIFFERS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of a measurement of tokens/s")
    parser.add_argument("--window", type=float, default=15.0, help="seconds of a window of the advisor")
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--log", type=Path, help="audit log of the advisor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        over_the_caches(folder)
        for scenario in args.scenarios:
            found = results[scenario] = run(folder, SCENARIOS[scenario], args)
            found["is_right"] = is_right(found, SCENARIOS[scenario])
            if "gain" in found:
                print(
                    f"{scenario}: {found['advised']} instead of {SCENARIOS[scenario].start}: "
                    f"{found['tokens_per_second_before']:.1f} to {found['tokens_per_second_after']:.1f} tokens/s, "
                    f"{found['gain']:+.0%} measured, {found['gain_predicted']:+.0%} predicted", flush=True,
                )  # fmt: skip
    records.write("advisor", results, args.out)
    if not all(found["is_right"] for found in results.values()):
        raise SystemExit("the advice was not what it should be, or not faster")


if __name__ == "__main__":
    main()
