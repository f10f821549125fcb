"""`moewe record` and `moewe replay`: routing of a model on prompts, kept in files, and what placements make of it.

Not the recorder (runtime/recording.py) and not the arithmetic (moe.wide_ep.balancing). Units: tokens, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...topologies import AUTO, RankGrid, Topology, load_layout, parse_topology
from ..flags.values import Settings
from ..terminal.stdout import put
from .serve import config_of

if TYPE_CHECKING:
    from ...moe.wide_ep.balancing.replay import Replayed
    from ...moe.wide_ep.traces import RoutingTrace

TOPOLOGY = "EP8DP1"
ROW_BYTES = 7168 * 2  # a token of DeepSeek-V3 and Kimi K2 in bf16
MOST_TOKENS = 100_000


def record(settings: Settings) -> int:
    """Record, write what was asked for, and print what placements make of it on `--topology`."""
    tool = settings.tool
    for name, least, value in (
        ("max-tokens", 1, tool.get("max_tokens", 1)),
        ("most-tokens", 1, tool.get("most_tokens", 1)),
    ):
        if value < least:
            raise ValueError(f"--{name} {value} is not allowed; use at least {least}")
    prompts = read_prompts(tool.get("prompts"))
    config = config_of(settings)
    asked = None
    if "topology" in settings.engine and config.parallel.topology != AUTO:
        asked = parse_topology(config.parallel.topology)
    from ...models.families import load_config
    from ...runtime.params import SamplingParams
    from ...runtime.recording import record_routing
    from ...runtime.session import locate
    from ..terminal.bars import LoadingBars

    params = SamplingParams(
        max_tokens=tool.get("max_tokens", 64), temperature=tool.get("temperature", 0.0), seed=0, ignore_eos=False
    )
    config = locate(config)
    bars = LoadingBars()
    with bars.shown():
        trace = record_routing(
            config, prompts, params, most_tokens=tool.get("most_tokens", MOST_TOKENS), on_loading=bars.update
        )
    width = load_config(Path(config.model.path)).hidden_size  # rows travel in two bytes a column
    write_files(trace, tool)
    report(trace, asked or parse_topology(f"EP{min(8, trace.num_experts)}DP1"), 2 * width)
    return 0


def replay_file(tool: dict[str, Any]) -> int:
    """Print what placements make of a trace file on `--topology`."""
    if "trace" not in tool:
        raise ValueError("no --trace is given; name a file that `moewe record --trace FILE` wrote")
    row_bytes = tool.get("row_bytes", ROW_BYTES)
    if row_bytes < 1:
        raise ValueError(f"--row-bytes {row_bytes} is not allowed; use at least 1")
    topology = load_layout(tool.get("topology", TOPOLOGY)).single()
    from ...moe.wide_ep.traces import load_trace

    trace = load_trace(Path(tool["trace"]))
    write_files(trace, {"load": tool["load"]} if "load" in tool else {})
    report(trace, topology, row_bytes)
    return 0


def read_prompts(file: str | None) -> list[str]:
    """Return the lines of `file` that are not blank."""
    if file is None:
        raise ValueError("no --prompts is given; name a text file with a prompt a line")
    try:
        lines = [line for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {file!r} is not UTF-8 text; convert it, for example with iconv") from None
    if not lines:
        raise ValueError(f"--prompts {file!r} has no prompt; write one a line")
    return lines


def write_files(trace: RoutingTrace, tool: dict[str, Any]) -> None:
    """Write the files that `trace` and `load` of `tool` name."""
    from ...moe.wide_ep.balancing import write_load
    from ...moe.wide_ep.balancing.replay import load_of
    from ...moe.wide_ep.traces import save_trace

    if "trace" in tool:
        save_trace(trace, Path(tool["trace"]))
    if "load" in tool:
        write_load(load_of(trace), Path(tool["load"]))


def report(trace: RoutingTrace, topology: Topology, row_bytes: int) -> None:
    """Print the table of a trace on a topology."""
    from ...moe.wide_ep.balancing.replay import replay

    domains = RankGrid(topology, topology.num_ranks).domains()
    results = replay(trace, num_redundant=topology.red, domains=domains, row_bytes=row_bytes)
    tokens = ", ".join(f"{trace.num_tokens(phase):,} of {phase}" for phase in trace.ids)
    put(f"{tokens}; {trace.num_layers} MoE layers, {trace.num_experts} experts, top-{trace.top_k}\n")
    put(f"{topology.long()}: placements made from the first half, judged on the second\n\n")
    for phase in trace.ids:
        put("\n".join(table(phase, [each for each in results if each.phase == phase])) + "\n\n")


def table(phase: str, results: Sequence[Replayed]) -> list[str]:
    """Return the lines of one phase: fullest rank over mean by layer, then the mean, then bytes between domains."""
    lines = [phase.ljust(18) + "".join(each.placement.rjust(10) for each in results)]
    for layer in range(len(results[0].imbalance)):
        lines.append(f"layer {layer}".ljust(18) + "".join(f"{each.imbalance[layer]:10.3f}" for each in results))
    lines.append("all layers".ljust(18) + "".join(f"{each.imbalance.mean():10.3f}" for each in results))
    lines.append("bytes between".ljust(18) + "".join(f"{each.bytes_between:10.0f}" for each in results))
    lines.append("  by domain".ljust(18) + "".join(f"{each.bytes_between_hierarchical:10.0f}" for each in results))
    return lines
