"""How fast is moewe beside llama.cpp, vLLM CPU, OpenVINO GenAI and transformers on this CPU? On bench-1b, by weights.

Not a test of the peers: each runs with its own defaults as far as they fit the question. Every runtime is a process of
its own Python (peer_worker.py), so that no library meets another's threads or versions. For each format of the weights,
ours and all peers that have it are loaded together and measured in turns; who is not measured is stopped. pp512: one
prompt of 512 tokens. dN: decode of N requests together, 128-token prompts, 64 tokens each; rate =
N * (new tokens - 1) / (time for all new tokens - time for the first one), in tokens per second. Every answer must have
the right number of tokens; before anything is timed, the share of first greedy tokens that agree with ours in bf16 is
shown. A peer that dies or hangs is left out of what follows. docs/performance.md: how the environments are made.

Example:

    python benchmarks/peers.py --repeats 2 --measures pp512 d1 d4 d16 d32 \\
        --peer llamacpp=PEERS/llamacpp/bin/python --peer vllm=PEERS/vllm/bin/python \\
        --peer openvino=PEERS/openvino/bin/python --peer transformers=PEERS/transformers/bin/python
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_checkpoints
import records
from bench_1b import NEW_TOKENS, PREFILL_TOKENS, PROMPT_TOKENS, checkpoint, prompts
from peer_process import Lost, Worker
from peer_worker import MAX_REQUESTS, MAX_TOKENS

OURS = "moewe"
# Which peers have a format of the weights at all.
COLUMNS = {
    "bf16": ("llamacpp", "vllm", "transformers"),
    "int8": ("llamacpp", "openvino"),
    "int4": ("llamacpp", "openvino"),
}
# (measure, weights) -> peer -> the ratio ours / peer that this version aims at.
_DECODES = {
    "int8": {"llamacpp": 5.0, "openvino": 2.5},
    "int4": {"llamacpp": 5.0, "openvino": 2.5},
    "bf16": {"vllm": 2.5},
}
WANTED: dict[tuple[str, str], dict[str, float]] = {
    ("pp512", "bf16"): {"vllm": 3.0, "llamacpp": 10.0},
    ("pp512", "int8"): {"llamacpp": 10.0},
    ("pp512", "int4"): {"llamacpp": 8.0},
    ("d1", "bf16"): {"llamacpp": 1.35},
    ("d1", "int8"): {"llamacpp": 1.8},
    ("d1", "int4"): {"llamacpp": 1.8},
    **{(measure, weights): wanted for measure in ("d16", "d32") for weights, wanted in _DECODES.items()},
}
CHECKED_PROMPTS = 16


def measure_name(text: str) -> str:
    """Return `text` if it names a measure that the workers have room for."""
    found = re.fullmatch(r"(pp|d)([1-9]\d*)", text)
    most = {"pp": MAX_TOKENS - 1, "d": MAX_REQUESTS}
    if found is None or int(found[2]) > most[found[1]]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no measure; say ppN with N up to {most['pp']} or dN with N up to {most['d']}"
        )
    return text


def peer_python(text: str) -> tuple[str, str]:
    """Return (runtime, interpreter) of `NAME=PYTHON`."""
    name, _, python = text.partition("=")
    known = sorted({peer for peers in COLUMNS.values() for peer in peers})
    if name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} names no peer; say NAME=PYTHON with NAME of {', '.join(known)}")
    if not os.access(python, os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {python!r} cannot be run; give the Python of {name}'s environment")
    return name, python


class Side:
    """One runtime with one format of the weights."""

    def __init__(self, runtime: str, worker: Worker, new_tokens: int) -> None:
        self.runtime, self.worker, self._new_tokens = runtime, worker, new_tokens

    def load(self, path: Path, weights: str, threads: int) -> dict[str, Any]:
        """Load the checkpoint; return the version of the runtime and how long that took."""
        order = {"runtime": self.runtime, "path": str(path.resolve()), "weights": weights, "threads": threads}
        with self.worker.awake():
            answer = self.worker.ask(order, "loading")
            return {"version": answer["version"], "load_s": answer["seconds"]}

    def generate(self, batch: list[list[int]], new_tokens: int, doing: str) -> tuple[list[list[int]], float]:
        """Return tokens and seconds; `Lost` unless every prompt got as many tokens as asked for."""
        answer = self.worker.ask({"prompts": batch, "new_tokens": new_tokens}, doing)
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != [new_tokens] * len(batch):
            raise Lost(
                f"{self.worker.name}: gave {counts} tokens for {len(batch)} prompts, asked for {new_tokens} each"
            )
        return answer["tokens"], answer["seconds"]

    def first_tokens(self) -> list[int]:
        """Return the first greedy token of the prompts that are checked; warms up both kinds of measures too."""
        with self.worker.awake():
            self.generate(prompts(1, PREFILL_TOKENS), 1, "warming up")
            tokens, _ = self.generate(prompts(CHECKED_PROMPTS, PROMPT_TOKENS), 2, "the check")
        return [row[0] for row in tokens]

    def rate(self, measure: str) -> float:
        """Return tokens per second."""
        with self.worker.awake():
            if measure.startswith("pp"):
                length = int(measure[2:])
                # It stood still for minutes: clocks, caches and threads of all sides wake in a first, untimed prompt.
                self.generate(prompts(1, length), 1, measure)
                return length / self.generate(prompts(1, length), 1, measure)[1]
            batch = prompts(int(measure[1:]), PROMPT_TOKENS)
            _, first = self.generate(batch, 1, measure)
            _, every = self.generate(batch, self._new_tokens, measure)
        return decode_rate(len(batch), self._new_tokens, first, every)


def decode_rate(number: int, new_tokens: int, first_s: float, every_s: float) -> float:
    """Return tokens per second of `number` requests after their first token."""
    return number * (new_tokens - 1) / (every_s - first_s)


def ratios(rates: dict[str, list[float]], measure: str, weights: str) -> dict[str, Any]:
    """Return the summary of every side and, for each peer, ours / peer by medians beside the wanted ratio."""
    found: dict[str, Any] = {side: records.summary(values) for side, values in rates.items()}
    wanted = WANTED.get((measure, weights), {})
    for side in found:
        if side != OURS:
            found[side]["ratio"] = found[OURS]["median"] / found[side]["median"]
            found[side]["wanted"] = wanted.get(side)
    return found


def shown(measure: str, found: dict[str, Any]) -> str:
    """Return the line of one measure for people."""
    parts = []
    for side, figures in found.items():
        part = f"{side} {figures['median']:.1f} [{figures['min']:.1f}, {figures['max']:.1f}]"
        if side != OURS:
            part += f" x{figures['ratio']:.2f}"
            if figures["wanted"] is not None:
                met = "met" if figures["ratio"] >= figures["wanted"] else "SHORT"
                part += f" (wanted {figures['wanted']:g}: {met})"
        parts.append(part)
    return f"{measure:>6} tok/s: {'   '.join(parts)}"


class Column:
    """Ours and the peers of one format of the weights, loaded together."""

    def __init__(self, weights: str, args: argparse.Namespace, path: Path) -> None:
        self._weights, self._args, self._path = weights, args, path
        self._sides: dict[str, Side] = {}
        self._rates: dict[str, dict[str, list[float]]] = {measure: {} for measure in args.measures}
        self.results: dict[str, Any] = {"sides": {}, "left_out": {}}

    def run(self) -> None:
        """Convert, load, check and measure in turns; `results` has what was found, also after an interruption."""
        pythons = {OURS: sys.executable, **dict(self._args.peer)}
        here = [runtime for runtime in (OURS, *COLUMNS[self._weights]) if runtime in pythons]
        try:
            # All conversions first: the export to OpenVINO takes more memory than any worker.
            paths = {runtime: self._attempt(runtime, self._convert, runtime, pythons[runtime]) for runtime in here}
            for runtime, path in paths.items():
                if path is not None:
                    self._attempt(runtime, self._load, runtime, pythons[runtime], path)
            self._check()
            for _ in range(self._args.repeats):
                for measure in self._args.measures:
                    self._turn(measure)
            for runtime, side in self._sides.items():
                self.results["sides"][runtime]["memory_mib"] = round(side.worker.memory_mib())
                side.worker.end()
        finally:
            for side in self._sides.values():
                side.worker.kill()
            self._show()

    def _attempt(self, runtime: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `work` returns; a peer that is lost meanwhile is left out (None), ours ends the script."""
        try:
            return work(*arguments)
        except (Lost, peer_checkpoints.NotMade) as error:
            side = self._sides.pop(runtime, None)
            if side is not None:
                side.worker.kill()
            if runtime == OURS:
                raise SystemExit(str(error)) from None
            print(f"left out: {error}", flush=True)
            self.results["left_out"][runtime] = str(error)
            return None

    def _convert(self, runtime: str, python: str) -> Path:
        return peer_checkpoints.ensure(runtime, self._weights, self._path, self._args.converted, python)

    def _load(self, runtime: str, python: str, path: Path) -> None:
        threads = str(self._args.threads)
        worker = Worker(
            f"{runtime}/{self._weights}",
            # -P: what lies beside that file must not be taken for a library's module of the same name.
            [python, "-P", str(Path(__file__).with_name("peer_worker.py"))],
            {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
            self._args.limit_s,
        )
        self._sides[runtime] = Side(runtime, worker, self._args.new_tokens)
        found = self._sides[runtime].load(path, self._weights, self._args.threads)
        self.results["sides"][runtime] = found
        print(f"{worker.name}: version {found['version']}, loaded in {found['load_s']:.0f} s", flush=True)

    def _check(self) -> None:
        firsts = {name: self._attempt(name, side.first_tokens) for name, side in list(self._sides.items())}
        ours = firsts.pop(OURS)
        for runtime, theirs in firsts.items():
            if theirs is not None and self._weights == "bf16":
                share = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
                self.results["sides"][runtime]["first_token_agreement"] = share
                print(f"{runtime}/bf16: first greedy token agrees with ours for {share:.0%} of {len(ours)} prompts")

    def _turn(self, measure: str) -> None:
        for runtime, side in list(self._sides.items()):
            rate = self._attempt(runtime, side.rate, measure)
            if rate is not None:
                self._rates[measure].setdefault(runtime, []).append(rate)
                print(f"  {side.worker.name} {measure}: {rate:.1f}", file=sys.stderr, flush=True)

    def _show(self) -> None:
        for measure, sides in self._rates.items():
            if OURS in sides:
                self.results[measure] = ratios(sides, measure, self._weights)
                print(f"{self._weights} {shown(measure, self.results[measure])}", flush=True)
        memory = {name: side["memory_mib"] for name, side in self.results["sides"].items() if "memory_mib" in side}
        if memory:
            print(f"{self._weights} MiB at the end: {', '.join(f'{name} {mib:,}' for name, mib in memory.items())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moewe" / "bench-1b"
    parser.add_argument(
        "--peer", action="append", default=[], type=peer_python, metavar="NAME=PYTHON", help="repeatable"
    )
    parser.add_argument("--formats", nargs="+", default=list(COLUMNS), choices=list(COLUMNS), help="of the weights")
    parser.add_argument("--measures", nargs="+", default=["pp512", "d1", "d4", "d16", "d32"], type=measure_name)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="compute threads of every runtime")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="a request; less only to try it out")
    parser.add_argument("--limit-s", type=float, default=900, help="longest wait for one answer, loading too")
    parser.add_argument("--dir", type=Path, default=cache, help="where bench-1b is or will be made (2.7 GB)")
    parser.add_argument("--converted", type=Path, help="where converted checkpoints lie (7 GB; default: DIR-peers)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name, least in (("repeats", 1), ("threads", 1), ("new_tokens", 2)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give {least} or more")
    args.converted = args.converted or args.dir.with_name(f"{args.dir.name}-peers")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended as after Ctrl-C
    path = checkpoint(args.dir)
    results: dict[str, Any] = {"threads": args.threads, "new_tokens": args.new_tokens}
    try:
        for weights in args.formats:
            column = Column(weights, args, path)
            results[weights] = column.results
            column.run()
    except KeyboardInterrupt:
        sys.exit("interrupted; every worker has ended")
    finally:
        records.write("peers", results, args.out)


if __name__ == "__main__":
    main()
