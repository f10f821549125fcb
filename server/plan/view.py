"""A plan as text.

Not the plan (record.py). Units: as written.
"""

from __future__ import annotations

from typing import Any

from ...topologies.budget import format_bytes


def plan_text(plan: dict[str, Any]) -> str:
    """Return a plan of named pools for people."""
    model, hardware, workload = plan["model"], plan["hardware"], plan["workload"]
    note = ", PRELIMINARY figures" if hardware["preliminary"] else ""
    lines = [
        f"{model['name']}: {model['parameters_in_matrices'] / 1e9:,.1f} B parameters in matrices, "
        f"{model['active_parameters'] / 1e9:,.1f} B for a token, {format_bytes(model['weights_bytes'])} "
        f"({model['facts_from']})",
        f"{hardware['name']}: {hardware['title']}{note}",
        f"workload: {workload['isl']:,} tokens in, {workload['osl']:,} out, {workload['concurrency']:,} requests at "
        f"once" + (f", {workload['prefix_hit_share']:.0%} of prompts in the prefix cache" * bool(
            workload["prefix_hit_share"])) + (
            f", {workload['drafts']} drafts a step accepted with {workload['draft_acceptance']:g}"
            if workload["drafts"] else ""),
        _formats(plan["settings"]),
        "",
    ]  # fmt: skip
    for name, pool in plan["pools"].items():
        lines += _pool_lines(name, pool, alone=len(plan["pools"]) == 1)
    return (
        "\n".join([*lines, *_step_lines(plan["decode_step"], plan["served"]), "", *_served_lines(plan["served"])])
        + "\n"
    )


def _formats(settings: dict[str, Any]) -> str:
    """Return what bytes and rows were taken to be."""
    overlap = ", exchanges under experts" if settings["overlap"] else ""
    return (
        f"planned with weights {', '.join(settings['weights'])}, KV {settings['kv_cache_dtype']}, experts popular: "
        f"{settings['popularity']}{overlap}"
    )


def _pool_lines(name: str, pool: dict[str, Any], *, alone: bool) -> list[str]:
    lines = [] if alone else [f"pool {name}"]
    lines += [*pool["expansion"], f"  divides    {pool['divisibility']}", *(f"  note: {w}" for w in pool["warnings"])]
    lines += [*_short(pool["domain_map"][1:]), *(f"  {line}" for line in _short(pool["expert_map"])), ""]
    lines += [*pool["budget"]["text"], "", "the same elsewhere"]
    for server, words in pool["flags"].items():
        lines += [f"  {server + ':':13} {words[0]}", *(f"  {'':13} {word}" for word in words[1:])]
    return [*lines, ""]


def _short(lines: list[str], most: int = 8) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"  ... {len(lines) - most + 1} more"]


def _step_lines(step: dict[str, Any], served: dict[str, Any]) -> list[str]:
    rows = f"{served['sequences_per_attention_replica']:,.1f} sequences on each attention replica"
    if served["prompt_rows_beside"]:
        rows += f" and {served['prompt_rows_beside']:,.0f} rows of prompts"
    lines = [
        f"a step of {rows} takes {_ms(step['seconds'])}, bound by {step['binds']}; it reads at "
        f"{step['memory_saturation']:.0%} of the memory's bandwidth"
    ]
    for part in step["parts"]:
        moved = f"{format_bytes(int(part['bytes'])):>11}" if part["bytes"] else " " * 11
        computed = f"{part['flops'] / 1e9:>10,.1f} GFLOP" if part["flops"] else " " * 16
        share = part["seconds"] / step["seconds"]
        lines.append(f"  {part['name']:20}{_ms(part['seconds']):>11} {share:>5.0%} {moved} {computed}  {part['binds']}")
    if step["compute_seconds"]:
        share = step["compute_seconds"] / step["seconds"]
        flops = sum(part["flops"] for part in step["parts"])
        lines.append(
            f"  {'FLOPs of all these':20}{_ms(step['compute_seconds']):>11} {share:>5.0%} {'':11} "
            f"{flops / 1e9:>10,.1f} GFLOP"
        )
    if step["hidden_seconds"]:
        lines.append(f"  {'hidden by overlap':20}{'-' + _ms(step['hidden_seconds']):>11}")
    return lines


def _served_lines(served: dict[str, Any]) -> list[str]:
    waiting = f", {served['ttft_waiting_seconds']:.2f} s of it waiting" * (served["ttft_waiting_seconds"] >= 0.005)
    lines = [
        f"time to the first token {served['ttft_seconds']:.2f} s{waiting}; then {_ms(served['tpot_seconds'])} a token",
        f"{served['requests_per_second']:,.2f} requests/s; limited by {_LIMITS[served['limit']]}",
    ]
    lines += [
        f"  {entry['tokens_per_second']:>10,.1f} tokens/s: {entry['numerator']} / {entry['denominator']}"
        for entry in served["rates"]
    ]
    if served["price_per_million_output_tokens"] is not None:
        lines.append(f"  {served['price_per_million_output_tokens']:>10,.3f} a million output tokens, at that price")
    if served["joules_per_output_token"] is not None:
        lines.append(f"  {served['joules_per_output_token']:>10,.2f} J an output token, GPUs alone")
    return lines


_LIMITS = {
    "concurrency": "how many requests there are",
    "prefill": "prompts, which come no faster",
    "kv": "KV, which holds no more",
}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
