"""The routing that a config asks for, against the router of transformers on the same hidden states."""

import pytest
import torch

from moewe.models.families import load_config
from moewe.moe.routing import route
from tests.support.fixtures import MOE_FIXTURES, checkpoint, random_prompt, reference_logits, reference_model
from tests.support.numerics import ROUTING_WEIGHTS

# Whose router does not return weights and ids a token; their logits are compared whole (tests/models/test_decoder.py).
OTHER_ROUTERS = ("T-GRA", "T-GRS", "T-HUN", "T-LL4")
VARIANTS = [(name, {}) for name in MOE_FIXTURES if name not in OTHER_ROUTERS]
VARIANTS += [("T-QW2", {"norm_topk_prob": True}), ("T-OLM", {"norm_topk_prob": True})]
VARIANTS += [("T-GLM-demo", {"norm_topk_prob": False}), ("T-GLM-demo", {"num_experts_per_tok": 3})]


def routed_by_reference(path, num_tokens):
    """Return (hidden [T, D], router, bias, weights [T, K], ids [T, K]) of every MoE layer of a pass of transformers."""
    seen, hooks = [], []
    model = reference_model(path)
    for layer in model.model.layers:
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        bias = next((t.flatten() for name, t in tensors if name.endswith("e_score_correction_bias")), None)
        for router in [m for m in layer.modules() if type(m).__name__.lower().endswith("topkrouter")]:

            def keep(module, args, out, bias=bias):
                seen.append((args[0].reshape(-1, args[0].shape[-1]), module, bias, out[1], out[2]))

            hooks.append(router.register_forward_hook(keep))
    try:
        reference_logits(path, random_prompt(num_tokens))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=str)
def test_experts_and_weights_are_those_of_transformers(name, changes):  # P-LOAD-10, P-LOAD-12
    path = checkpoint(name, **changes)
    config = load_config(path)
    layers = routed_by_reference(path, 256)
    assert len(layers) == len(config.moe_layers)
    for hidden, router, bias, weights, ids in layers:
        assert (bias is not None) == config.moe.selection_bias
        logits = torch.nn.functional.linear(hidden.float(), router.weight.float(), getattr(router, "bias", None))
        routing = route(logits, config.moe.routing, bias)
        order, reference_order = routing.topk_ids.argsort(-1), ids.argsort(-1)
        assert torch.equal(routing.topk_ids.gather(-1, order).long(), ids.gather(-1, reference_order))
        held, expected = routing.topk_weights.gather(-1, order), weights.gather(-1, reference_order)
        assert (held - expected).abs().max() <= ROUTING_WEIGHTS * config.moe.routing.scaling_factor
        if config.moe.routing.scoring == "softmax" and not config.moe.routing.renormalize:
            assert routing.topk_weights.sum(-1).min() < config.moe.routing.scaling_factor
