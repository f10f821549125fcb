"""What does the server add to a token? 64 streams from a model that costs nothing, on as many cores as there are.

HTTP, engine, scheduler, books and detokeniser are real (benchmarks/null_engine.py replaces what a rank computes).
Two runs a route: free, as fast as it can, gives tokens/s; paced, one step each `--step-ms`, gives what is added to a
token, from the moment its step ended in the rank to the moment its event was read by the client. The client is one
process with plain sockets on the same machine; its share of CPU is shown.

    python benchmarks/server_overhead.py
    python benchmarks/server_overhead.py --cores 2     # pin server, engine and client to two cores
    python benchmarks/server_overhead.py --profile     # and show where the server's time goes (needs py-spy)
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import null_engine
import numpy as np
import psutil
import records

from moewe.models.demo import ensure_demo_checkpoint
from moewe.text import Tokenizer, load_tokenizer

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NAME, PROMPT = "null", 32
WANTED_TOKENS_S, WANTED_MS = 3000.0, 3.0
_EVENT, _END = b"data: {", b"data: [DONE]\n\n"
# Innermost functions in which a thread sleeps; a sandboxed kernel does not always let py-spy see that it does.
_WAITS = ("_worker", "EpollSelector.select", "Condition.wait", "hold_lifeline", "Channel._wait", "Workers.receive",
          "NullWorker.run", "EngineLoop._listen", "Watchdog")  # fmt: skip


def serve() -> None:
    """Be the server: the command line as it is, with another engine behind it."""
    import moewe.runtime.launcher
    from moewe.__main__ import main as run

    moewe.runtime.launcher.ENGINE_MODULE = "null_engine"
    sys.argv = ["moewe", "serve", *sys.argv[2:]]
    run()


@dataclass
class Stream:
    """One connection, its answers so far, and when each token of the running one arrived."""

    number: int
    sock: socket.socket
    tail: bytes = b""
    answer: bytearray = field(default_factory=bytearray)
    moments: list[float] = field(default_factory=list)
    rounds_left: int = 0


class Load:
    """`connections` clients, each of which asks `rounds` times for `tokens` tokens."""

    def __init__(self, port: int, args: argparse.Namespace, route: str, stamps: np.ndarray, rounds: int) -> None:
        self._port, self._args, self._route, self._stamps, self._rounds = port, args, route, stamps, rounds
        self._selector = selectors.DefaultSelector()
        self.first: bytes = b""
        self.added: list[float] = []
        self.num_tokens = 0

    def run(self) -> float:
        """Ask, read to the end, and return the seconds that it took."""
        began = time.monotonic()
        for number in range(self._args.connections):
            stream = Stream(number, socket.create_connection(("127.0.0.1", self._port)), rounds_left=self._rounds)
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ask(stream)
            self._selector.register(stream.sock, selectors.EVENT_READ, stream)
        while self._selector.get_map():
            # All that is there is read before any of it is looked at: no stream pays for what we do with another.
            arrived = [(key.data, key.data.sock.recv(1 << 16), time.monotonic()) for key, _ in self._selector.select()]
            for stream, data, moment in arrived:
                self._take(stream, data, moment)
        return time.monotonic() - began

    def _ask(self, stream: Stream) -> None:
        body: dict[str, Any] = {"model": NAME, "max_tokens": self._args.tokens, "ignore_eos": True, "stream": True}
        body["seed"] = stream.number  # where the rank puts the moments of this stream
        if self._route == "chat":
            body["messages"] = [{"role": "user", "content": "Say something."}]
        else:
            body["prompt"] = [1000] * PROMPT
        data = json.dumps(body).encode()
        head = f"POST {ROUTES[self._route]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        stream.sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        stream.rounds_left -= 1
        stream.answer, stream.moments, stream.tail = bytearray(), [], b""

    def _take(self, stream: Stream, data: bytes, moment: float) -> None:
        if not data:
            raise SystemExit(f"the server hung up: {bytes(stream.answer[-300:])!r}")
        stream.answer += data
        whole = stream.tail + data
        stream.moments += [moment] * whole.count(_EVENT)
        stream.tail = whole[-(len(_EVENT) - 1) :]
        if stream.answer.endswith(b"0\r\n\r\n") and _END in stream.answer[-40:]:
            self._finish(stream)

    def _finish(self, stream: Stream) -> None:
        self.first = self.first or bytes(stream.answer)
        moments = stream.moments
        if self._route == "chat":
            moments = moments[1:-1]  # the role before the first token, the reason after the last
        if len(moments) != self._args.tokens:
            raise SystemExit(f"{len(moments)} events, not {self._args.tokens}: {bytes(stream.answer[:600])!r}")
        stamps = self._stamps[stream.number]
        start = np.flatnonzero(stamps)[0]
        made = stamps[start : start + self._args.tokens]
        self.added += (np.array(moments) - made).tolist()
        self.num_tokens += len(moments)
        if stream.rounds_left:
            self._ask(stream)
            return
        self._selector.unregister(stream.sock)
        stream.sock.close()


def events_of(answer: bytes) -> list[dict[str, Any]]:
    """Return the events of a chunked answer."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(_EVENT)]


def check(route: str, answer: bytes, start: int, tokens: int, tokenizer: Tokenizer) -> None:
    """Compare the text of one answer with what the null model says."""
    choices = [event["choices"][0] for event in events_of(answer)]
    said = "".join(
        choice["text"] if route == "completions" else choice["delta"].get("content", "") for choice in choices
    )
    expected = null_engine.spoken_text(tokenizer, start, tokens)
    if said != expected or choices[-1]["finish_reason"] != "length":
        raise SystemExit(f"wrong text on {route}: {said[:80]!r} instead of {expected[:80]!r}")


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Return the CPU time of each process so far."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server takes requests."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the server ended at its start")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server was not ready within a minute")


class Profile:
    """py-spy on one process while a load runs."""

    def __init__(self, name: str, pid: int) -> None:
        self._name = name
        self._file = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  closed in `show`
        spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
        command = [spy, "record", "--pid", str(pid), "--duration", "600", "--rate", "500", "--format", "raw"]
        self._process = subprocess.Popen(
            [*command, "--output", self._file.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(1.0)

    def show(self, most: int = 25) -> None:
        """Print the functions by the share of samples in them, alone and with what they call."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        own: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        for line in self._file.read().splitlines():
            stack, _, count = line.rpartition(" ")
            frames = [frame.rpartition(":")[0] for frame in stack.split(";")]
            if frames[-1].startswith(_WAITS):
                continue
            own[frames[-1]] += int(count)
            for frame in set(frames):
                whole[frame] += int(count)
        self._file.close()
        total = sum(own.values()) or 1
        print(f"{self._name}: {total} samples; share alone, share with what it calls")
        for frame, count in own.most_common(most):
            print(f"  {100 * count / total:5.1f} %  {100 * whole[frame] / total:5.1f} %  {frame}")


def measure(route: str, step_ms: float, args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Start a server, warm it up, put load on it, and return the figures."""
    with tempfile.NamedTemporaryFile() as file:
        shape = (args.connections, PROMPT + 64 + args.tokens)
        stamps = np.memmap(file.name, np.float64, "w+", shape=shape)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]),
            null_engine.STEP_VARIABLE: str(step_ms / 1e3),
            null_engine.STAMPS_VARIABLE: file.name,
            null_engine.SHAPE_VARIABLE: f"{shape[0]}x{shape[1]}",
        }
        command = [sys.executable, __file__, "--serve", "demo", "--port", str(port), "--served-model-name", NAME]
        command += ["--max-num-seqs", str(args.connections), "--log-level", "warning"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            wait_ready(port, process)
            server = psutil.Process(process.pid)
            watched = {"server": server, "engine": server.children()[0], "client": psutil.Process()}
            warm = Load(port, args, route, stamps, 1)
            warm.run()
            check(route, warm.first, int(np.flatnonzero(stamps[0])[0]), args.tokens, tokenizer)
            load = Load(port, args, route, stamps, args.rounds)
            names = ("server", "engine") if args.profile else ()
            profiles = [Profile(f"{name}, {route}, {step_ms:g} ms", watched[name].pid) for name in names]
            before = cpu_seconds(watched)
            took = load.run()
            after = cpu_seconds(watched)
            for profile in profiles:
                profile.show()
        finally:
            process.terminate()
            process.wait()
    added = np.array(load.added) * 1e3
    return {
        "route": route,
        "step_ms": step_ms,
        "tokens_s": load.num_tokens / took,
        "added_ms": {"p50": float(np.percentile(added, 50)), "p95": float(np.percentile(added, 95)),
                     "p99": float(np.percentile(added, 99))},
        "cpu_us_per_token": {name: 1e6 * (after[name] - before[name]) / load.num_tokens for name in watched},
    }  # fmt: skip


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each connection")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the paced runs: 64 streams make 3200 tokens/s")
    parser.add_argument("--cores", type=int, default=0, help="pin everything to so many cores")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--profile", action="store_true", help="show where time goes; the figures are worse then")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.cores]))
    tokenizer = load_tokenizer(ensure_demo_checkpoint())
    rows = [measure(route, step_ms, args, tokenizer) for route in args.routes for step_ms in (0.0, args.step_ms)]
    print(
        f"{args.connections} streams of {args.tokens} tokens, {len(os.sched_getaffinity(0))} cores; CPU in us a token"
    )
    titles = ("step", "tokens/s", "added p50", "p95", "server", "engine", "client")
    print(f"{'route':<12} " + " ".join(f"{title:>10}" for title in titles))
    for row in rows:
        cpu, added = row["cpu_us_per_token"], row["added_ms"]
        paced = f"{row['step_ms']:.0f} ms" if row["step_ms"] else "free"
        figures = [f"{row['tokens_s']:.0f}", f"{added['p50']:.2f} ms", f"{added['p95']:.2f} ms"]
        figures += [f"{cpu[name]:.1f}" for name in ("server", "engine", "client")]
        print(f"{row['route']:<12} " + " ".join(f"{figure:>10}" for figure in (paced, *figures)))
    fast = min(row["tokens_s"] for row in rows if not row["step_ms"])
    slow = max(row["added_ms"]["p50"] for row in rows if row["step_ms"])
    print(f"{fast:.0f} tokens/s (wanted: {WANTED_TOKENS_S:.0f})")
    print(f"{slow:.2f} ms added at the median (wanted: {WANTED_MS:.0f})")
    records.write("server_overhead", {"rows": rows, "tokens_s": fast, "added_ms": slow}, args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve()
    else:
        main()
