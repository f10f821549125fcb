"""Is serving with `--eplb auto` slower than with `off`, or faster? By a clock, with real rank processes.

Two servers of the same model stand side by side, each of ranks that are processes, and answer the same prompts in
turns, each being the first in every second round: the machine's moods fall on both. Prompts are random tokens. With
`--traffic hot` of few different ones (--vocabulary), which the routers send to few experts, so there is something to
balance; with `shifting` of others every --shift rounds; with `uniform` of all there are. Answers are compared: all
tokens have to be the same. Two ratios of auto / off are told: the median round by round, which leaves rounds out in
which a machine or a move took long, and that of all rounds together, which does not; medians of the first and of the
last half tell what moves brought.
On a machine with fewer cores than ranks times are those of ranks that take turns, and say little.
Units: seconds a round.

    python benchmarks/balancing_live.py --model demo --topology 'EP2DP1[red=4]' --rounds 30
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import records

from moewe.runtime.options import engine_config
from moewe.runtime.params import SamplingParams
from moewe.runtime.rank_stats import BalanceStats
from moewe.runtime.session import Session, locate

SIDES = ("off", "auto")


def serve(side: str, args: argparse.Namespace) -> Session:
    """Start a server with `eplb` of a side."""
    options: dict[str, Any] = {
        "model": args.model,
        "topology": args.topology,
        "eplb": side,
        "overlap": "off",  # each side would choose by links that it measured in another moment
        "skip_tokenizer_init": True,
        "max_model_len": args.prompt_tokens + args.new_tokens,
        "max_num_seqs": args.requests,
        "kv_cache_memory_bytes": 256 << 20,
    }
    if args.threads is not None:
        options["threads"] = args.threads
    return Session.start(locate(engine_config(options)))


def prompts(session: Session, args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Return the prompts of one round, of `args.vocabulary` different tokens of the model."""
    text = json.loads((Path(session.resolved.config.model.path) / "config.json").read_text())
    return drawn(int(text.get("text_config", text)["vocab_size"]), args, seed)


def drawn(size: int, args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Return the prompts of round `seed` of a model with `size` tokens."""
    dice, shape = np.random.default_rng(seed), (args.requests, args.prompt_tokens)
    if args.traffic == "uniform":
        return dice.integers(1, size, shape).tolist()  # type: ignore[no-any-return]
    which = seed // args.shift if args.traffic == "shifting" else 0
    few = np.random.default_rng([which, 1]).integers(1, size, args.vocabulary)
    return few[dice.integers(0, args.vocabulary, shape)].tolist()  # type: ignore[no-any-return]


def answer(session: Session, batch: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Return how long all answers take, and their tokens."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in batch]
    start = time.perf_counter()
    for i, delta in session.stream(batch, [params] * len(batch)):
        if delta.finish_reason == "error":
            raise SystemExit(f"a request failed: {delta.error}")
        tokens[i] += delta.token_ids
    return time.perf_counter() - start, tokens


def ratio(times: dict[str, list[float]], part: slice) -> float:
    """Return the median of auto / off in some rounds."""
    return statistics.median(auto / off for off, auto in zip(times["off"][part], times["auto"][part], strict=True))


def main() -> None:
    """Serve on both sides, print medians and ratios, write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a checkpoint, or the word demo")
    parser.add_argument("--topology", default="EP2DP1[red=4]")
    parser.add_argument("--threads", type=int, help="of each rank; else cores are divided")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=16, help="together in a round")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--traffic", choices=("hot", "shifting", "uniform"), default="hot")
    parser.add_argument("--shift", type=int, default=8, help="rounds with the same tokens of shifting traffic")
    parser.add_argument("--vocabulary", type=int, default=16, help="different tokens in prompts; fewer: more uneven")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for flag, least in (("rounds", 2), ("shift", 1)):
        if getattr(args, flag) < least:
            parser.error(f"--{flag} {getattr(args, flag)} is not allowed; use at least {least}")
    sessions: dict[str, Session] = {}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    try:
        for side in SIDES:
            sessions[side] = serve(side, args)
            answer(sessions[side], prompts(sessions[side], args, seed=0)[:2], 2)  # nothing is cold after it
        for number in range(args.rounds):
            batch, tokens = prompts(sessions["off"], args, seed=1 + number), {}
            for side in SIDES if number % 2 else SIDES[::-1]:
                seconds, tokens[side] = answer(sessions[side], batch, args.new_tokens)
                times[side].append(seconds)
            if tokens["off"] != tokens["auto"]:
                raise SystemExit(f"round {number}: auto gives other tokens than off")
        balance = sessions["auto"]._replicas.stats()[0].balance or BalanceStats(placement=0, slots=b"")
    finally:
        for session in sessions.values():
            session.close()
    results: dict[str, Any] = {
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
        **{f"seconds_{side}": records.summary(each) for side, each in times.items()},
        "ratio": ratio(times, slice(None)),
        "ratio_of_all": sum(times["auto"]) / sum(times["off"]),
        "ratio_first_half": ratio(times, slice(args.rounds // 2)),
        "ratio_last_half": ratio(times, slice(args.rounds // 2, None)),
        "moves": balance.moves,
        "rounds_taken_back": balance.taken_back,
        "move_seconds": balance.move_seconds,
        "gain_seconds": {"realised": balance.realised_seconds, "clocked": balance.clocked_seconds},
    }
    for side in SIDES:
        found = results[f"seconds_{side}"]
        print(f"{side:>5}: {found['median']:.3f} s a round [{found['min']:.3f}, {found['max']:.3f}]")
    print(
        f"auto / off: all rounds {results['ratio_of_all']:.3f}, median {results['ratio']:.3f} "
        f"(first half {results['ratio_first_half']:.3f}, "
        f"last half {results['ratio_last_half']:.3f}); {balance.moves} experts moved"
    )
    records.write("balancing_live", results, args.out)


if __name__ == "__main__":
    main()
