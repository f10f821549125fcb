"""How soon is a bad or explosive grammar refused, and what do others feel of it? The demo, with streams that go on.

Not a test (tests/e2e/test_structured.py says that they are refused). `--streams` clients stream while one client sends
hostile requests one after another; then while `--attackers` clients of one address send schemas that explode, all at
once and later as `Retry-After` says, for `--seconds`, and a client of another address new schemas that are sound; then
alone for as long. An attacker's answer must be a 400, or a 429 in parallel, and each stream must go on.
Units: milliseconds.

    python benchmarks/grammar_refusals.py --rounds 5 --attackers 64
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import records

NAME = "gull"
WANTED_MS = 1000.0


def hostile(number: int) -> dict[str, dict[str, Any]]:
    """Return hostile fields by name; those of another `number` are others, so that no verdict is remembered."""
    # The intersection of so many automata explodes, as do counts of counts.
    counted = f"(((((a{{0,{10 + number}}}){{0,10}}){{0,10}}){{0,10}}){{0,10}}){{0,10}}"
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}c{number}"} for i in range(3, 20)]
    return {
        "schema that explodes": {"guided_json": {"allOf": patterns}},
        "schema of 40,000 values": {"guided_json": {"enum": [f"v{number}.{i}" for i in range(40_000)]}},
        "schema that is only itself": {"guided_json": {"$ref": "#", "title": str(number)}},
        "schema of no type": {"guided_json": {"type": f"strng{number}"}},
        "regex that explodes": {"guided_regex": counted},
        "regex that does not parse": {"guided_regex": f"foo{number}**"},
        "grammar that does not parse": {"guided_grammar": f"nonsense{number}"},
    }


class Server:
    """`moewe serve demo` on a free port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-m",
            "moewe",
            "serve",
            "demo",
            "--served-model-name",
            NAME,
            "--log-level",
            "warning",
        ]
        self._process = subprocess.Popen([*command, "--port", str(self.port)], stdout=subprocess.DEVNULL)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit("the server ended")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


class Streams:
    """`number` streams that are asked again when they end, until `stop`; keeps the times between tokens."""

    def __init__(self, url: str, number: int) -> None:
        self.gaps_ms: list[float] = []
        self._url, self._stopping = url, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        body = {
            "model": NAME,
            "prompt": "The gull",
            "max_tokens": 200,
            "seed": seed,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.Client(timeout=60) as client:
            while not self._stopping.is_set():
                with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                    last = None
                    for line in answer.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps_ms.append((now - last) * 1e3)
                        last = now
                        if self._stopping.is_set():
                            break

    def stop(self) -> dict[str, float]:
        """End them; return what was between tokens."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if not self.gaps_ms:
            raise SystemExit("no stream was served")
        gaps = sorted(self.gaps_ms)
        return {"p50_ms": statistics.median(gaps), "p99_ms": gaps[int(len(gaps) * 0.99)], "max_ms": gaps[-1]}


def refusals(url: str, rounds: range) -> dict[str, list[float]]:
    """Send every hostile request once a round; return milliseconds to each answer."""
    found: dict[str, list[float]] = {}
    with httpx.Client(timeout=60) as client:
        for number in rounds:
            for name, fields in hostile(number).items():
                body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 5, **fields})
                start = time.perf_counter()
                answer = client.post(f"{url}/v1/completions", content=body)
                found.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
                if answer.status_code != 400:
                    raise SystemExit(f"{name}: {answer.status_code} {answer.text[:300]}")
    return found


def attack(url: str, number: int, seconds: float) -> dict[str, list[float]]:
    """Let `number` clients send schemas that explode, each new; return milliseconds to each answer by its status."""
    times: dict[str, list[float]] = {"400": [], "429": []}
    begin = threading.Barrier(number, action=lambda: print("ready", flush=True))

    def run(client_number: int) -> None:
        turn = 0
        with httpx.Client(timeout=60, verify=False) as client:  # reading certificates takes long
            begin.wait()
            until = time.perf_counter() + seconds
            while (start := time.perf_counter()) < until:
                schema = hostile(10_000 * (client_number + 1) + turn)["schema that explodes"]
                body = {"model": NAME, "prompt": "x", "max_tokens": 5, **schema}
                answer = client.post(f"{url}/v1/completions", json=body)
                times[str(answer.status_code)].append((time.perf_counter() - start) * 1e3)
                turn += 1
                if answer.status_code == 429 and turn > 1:  # the first wave comes all at once; then as clients do
                    time.sleep(float(answer.headers["retry-after"]))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def sound(url: str, seconds: float) -> tuple[list[float], int]:
    """Send new sound schemas from another address, five a second; return milliseconds to answers, and refusals."""
    times, refused, until = [], 0, time.perf_counter() + seconds
    with httpx.Client(timeout=60, transport=httpx.HTTPTransport(local_address="127.0.0.2")) as client:
        while (start := time.perf_counter()) < until:
            body = {"model": NAME, "prompt": "x", "max_tokens": 1, "guided_json": {"const": f"a{start}"}}
            answer = client.post(f"{url}/v1/completions", json=body)
            refused += answer.status_code == 429
            times.append((time.perf_counter() - start) * 1e3)
            time.sleep(max(0.0, 0.2 - times[-1] / 1e3))
    return times, refused


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--attackers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attack", metavar="URL", help="only attack a server, and print the times as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.attack:
        print(json.dumps(attack(args.attack, args.attackers, args.seconds)))
        return
    server = Server()
    try:
        refusals(server.url, range(1))  # warm
        streams = Streams(server.url, args.streams)
        began = time.perf_counter()
        times = refusals(server.url, range(1, 1 + args.rounds))
        beside = streams.stop()
        streams = Streams(server.url, args.streams)
        # In a process of their own: what they compute must not hold up the streams' clients.
        command = [sys.executable, __file__, "--attack", server.url, "--attackers", str(args.attackers)]
        attackers = subprocess.Popen([*command, "--seconds", str(args.seconds)], stdout=subprocess.PIPE)
        assert attackers.stdout is not None
        attackers.stdout.readline()
        sound_ms, refused = sound(server.url, args.seconds)
        parallel = json.loads(attackers.communicate()[0])
        beside_many = streams.stop()
        streams = Streams(server.url, args.streams)
        time.sleep(time.perf_counter() - began)
        alone = streams.stop()
    finally:
        server.close()
    results: dict[str, Any] = {"refusals_ms": {name: records.summary(values) for name, values in times.items()}}
    results["between_tokens"] = {"beside one": beside, "beside many": beside_many, "alone": alone}
    results["in_parallel"] = {
        f"{status} ms": records.summary(values) for status, values in parallel.items() if values
    } | {"sound schemas ms": records.summary(sound_ms), "sound schemas refused": refused}
    for name, values in results["refusals_ms"].items():
        print(f"{name:<32} 400 after {values['median']:7.1f} ms [{values['min']:.1f}, {values['max']:.1f}]")
    for name, values in results["in_parallel"].items():
        if isinstance(values, dict):
            shown = f"{values['runs']} times after {values['median']:.1f} ms [{values['min']:.1f}, {values['max']:.1f}]"
            print(f"{args.attackers} attackers, {name}: {shown}")
    print(f"of the sound schemas {refused} were refused with 429")
    for name, values in results["between_tokens"].items():
        shown = "  ".join(f"{key[:-3]} {value:.1f} ms" for key, value in values.items())
        print(f"between tokens of {args.streams} streams, {name:<16}: {shown}")
    answers = [*results["refusals_ms"].values(), *map(records.summary, filter(None, parallel.values()))]
    worst = max(values["max"] for values in answers)
    print(f"slowest refusal {worst:.0f} ms (wanted: {WANTED_MS:.0f})")
    records.write("grammar_refusals", results, args.out)


if __name__ == "__main__":
    main()
