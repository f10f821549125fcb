"""Whether decode steps are captured at all, how many rows they have, and what the graphs will take: before any start.

Not the capturing (capture.py) and not what a step takes (ladder.py). Pure but for log lines.
Units: rows of one rank, tokens, bytes of one rank.
"""

from __future__ import annotations

import logging

import msgspec

from ...models.config import ModelConfig
from ...topologies import ModelFootprint, Topology, format_bytes
from ...topologies.exchange_choice import ExchangeRule
from ...topologies.exchange_cost import capacity_of
from ..config import EngineConfig
from .ladder import GraphLadder, asked_sizes, token_classes

log = logging.getLogger(__name__)

# Tokens of a part of a sequence whose sums decode attention leaves in memory (attention/kernels/attend.py).
_SPLIT_TOKENS = 512
# What a graph keeps for a launch and how many launches a layer has: assumed, nobody has measured it yet. What capturing
# really took is told at start, and later as a part of the memory view.
_LAUNCH_BYTES, _LAUNCHES_A_LAYER = 4 << 10, 16
_ROWS_OF_STREAM = 8  # tensors of [rows, D] that live at a time, as budget.py has it


def why_eager(config: EngineConfig, topology: Topology, exchange: str) -> str | None:
    """Return why no decode step is captured; None where they are. `exchange` is that of decode steps."""
    if config.graphs.enforce_eager:
        return "enforce_eager"
    if topology.atp > 1:
        return f"ranks divide the heads (atp={topology.atp}), and what joins them is not captured"
    if exchange not in ("local", "padded"):
        return f"the exchange {exchange} asks the device how many rows go where; padded (in one domain) does not"
    return None


def with_graphs(
    config: EngineConfig, topology: Topology, rule: ExchangeRule, model: ModelConfig, footprint: ModelFootprint
) -> EngineConfig:
    """Return `config` with the rows to capture and what that takes, or with `enforce_eager`; say which.

    Raises:
        ValueError: what was asked for leaves nothing to capture.
    """
    graphs, exchange = config.graphs, rule.name("decode", 1)
    if (reason := why_eager(config, topology, exchange)) is not None:
        if graphs.cuda_graph_sizes or graphs.cuda_graph_max_bs is not None:
            log.warning("CUDA graphs: none, though sizes were given: %s", reason)
        else:
            log.info("CUDA graphs: none: %s", reason)
        graphs = msgspec.structs.replace(graphs, enforce_eager=True, cuda_graph_sizes=(), graph_rows=(), graph_bytes=0)
        return msgspec.structs.replace(config, graphs=graphs)
    ladder = ladder_of(config, exchange, config.model.max_model_len or model.max_position_embeddings)
    if not ladder.rows:
        raise ValueError(
            f"cuda_graph_sizes={list(graphs.cuda_graph_sizes)} has no size that a decode step here can have; use "
            f"smaller ones (max_num_seqs is {config.schedule.max_num_seqs}), or --enforce-eager"
        )
    num_bytes = estimated_bytes(ladder, topology, model, footprint)
    log.info(
        "CUDA graphs: decode steps of %s rows, sequences of up to %s tokens; some %s",
        ", ".join(map(str, ladder.rows)), ", ".join(f"{tokens:,}" for tokens in ladder.tokens), format_bytes(num_bytes),
    )  # fmt: skip
    graphs = msgspec.structs.replace(graphs, graph_rows=ladder.rows, graph_bytes=num_bytes)
    return msgspec.structs.replace(config, graphs=graphs)


def ladder_of(config: EngineConfig, exchange: str, max_model_len: int) -> GraphLadder:
    """Return the shapes that ranks with this config capture; `exchange` is that of decode steps."""
    graphs = config.graphs
    return GraphLadder(
        rows=graphs.graph_rows
        or asked_sizes(
            graphs.cuda_graph_sizes,
            graphs.cuda_graph_max_bs,
            max_num_seqs=config.schedule.max_num_seqs,
            exchange=exchange,
        ),
        tokens=token_classes(max_model_len),
        exchange=exchange,
        overlaps=config.parallel.overlap != "off",
    )


def estimated_bytes(ladder: GraphLadder, topology: Topology, model: ModelConfig, footprint: ModelFootprint) -> int:
    """Return what all graphs of a rank take: once what the largest needs while it runs, and a little for each.

    The graphs share their memory, because only one of them runs at a time. Weights, KV and inputs are not theirs.
    """
    rows, itemsize, width = ladder.rows[-1], footprint.activation_itemsize, footprint.hidden_size
    value_width = model.head_dim if model.latent is None else model.latent.kv_rank
    sums = rows * model.num_heads * -(-ladder.tokens[-1] // _SPLIT_TOKENS) * (value_width + 2) * 4
    logits = 2 * rows * footprint.vocab_size * 4
    stream = _ROWS_OF_STREAM * rows * width * itemsize
    queries = 2 * rows * (model.num_heads + 2 * model.num_kv_heads) * max(model.head_dim, value_width) * itemsize
    experts = 0
    if model.moe is not None:
        arrived = topology.ep * capacity_of(rows) if ladder.exchange == "padded" else rows
        choices = arrived * model.moe.routing.top_k
        experts = (arrived * width + choices * (3 * model.moe.expert_width + 2 * width)) * itemsize
    launches = _LAUNCHES_A_LAYER * footprint.num_layers * len(ladder.shapes)
    return sums + logits + stream + queries + experts + launches * _LAUNCH_BYTES
