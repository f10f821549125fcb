"""The routing that a config asks for, against the router of transformers on the same hidden states."""

import pytest
import torch

from moewe.models.families import load_config
from moewe.moe.routing import route
from tests.support.fixtures import MOE_FIXTURES, checkpoint, random_prompt, reference_logits, reference_model
from tests.support.numerics import ROUTING_WEIGHTS

VARIANTS = [(name, {}) for name in MOE_FIXTURES]
VARIANTS += [("T-QW2", {"norm_topk_prob": True}), ("T-OLM", {"norm_topk_prob": True})]
VARIANTS += [("T-GLM-demo", {"norm_topk_prob": False}), ("T-GLM-demo", {"num_experts_per_tok": 3})]


def routed_by_reference(path, num_tokens):
    """Return (hidden [T, D], router, weights [T, K], ids [T, K]) of every MoE layer of one pass of transformers."""
    seen, hooks = [], []
    model = reference_model(path)
    for layer in model.model.layers:
        gate = layer.mlp.gate
        hooks.append(
            gate.register_forward_hook(lambda m, args, out: seen.append((args[0].reshape(-1, 64), m, out[1], out[2])))
        )
    try:
        reference_logits(path, random_prompt(num_tokens))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=str)
def test_experts_and_weights_are_those_of_transformers(name, changes):  # P-LOAD-12
    path = checkpoint(name, **changes)
    config = load_config(path)
    layers = routed_by_reference(path, 256)
    assert len(layers) == len(config.moe_layers)
    for hidden, gate, weights, ids in layers:
        bias = gate.e_score_correction_bias if config.moe.selection_bias else None
        routing = route(hidden.float() @ gate.weight.float().T, config.moe.routing, bias)
        order, reference_order = routing.topk_ids.argsort(-1), ids.argsort(-1)
        assert torch.equal(routing.topk_ids.gather(-1, order).long(), ids.gather(-1, reference_order))
        held, expected = routing.topk_weights.gather(-1, order), weights.gather(-1, reference_order)
        assert (held - expected).abs().max() <= ROUTING_WEIGHTS * config.moe.routing.scaling_factor
        if config.moe.routing.scoring == "softmax" and not config.moe.routing.renormalize:
            assert routing.topk_weights.sum(-1).max() < 1
