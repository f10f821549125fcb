"""Which modules `modules_to_not_convert` leaves out."""

import pytest

from moewe.quant import MXFP4_SCHEME, Quantization

LEFT_OUT = [
    ("lm_head", "lm_head", True),
    ("model.layers.1", "model.layers.1.self_attn.q_proj", True),
    ("model.layers.1", "model.layers.11.self_attn.q_proj", False),
    ("model.layers.*.self_attn", "model.layers.11.self_attn.q_proj", True),
    ("model.layers.*.self_attn", "model.layers.11.self_attn", True),
    ("model.layers.*.self_attn", "model.layers.11.mlp.experts", False),
    ("model.layers.*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
    ("model.*.mlp.*.down_proj", "model.layers.3.mlp.experts.0.down_proj", True),
    ("model.*.mlp.*.down_proj", "model.layers.3.mlp.down_proj", False),
    ("down_proj", "model.layers.3.mlp.down_proj", True),
    ("layers.3.mlp", "model.layers.3.mlp.down_proj", False),
    ("*", "anything.at.all", True),
    ("model.", "model.layers.3.mlp.down_proj", True),
    ("(a+)+$", "a" * 60, False),
    ("*a" * 30 + "b", "a" * 200, False),
]


@pytest.mark.parametrize(("pattern", "module", "left_out"), LEFT_OUT)
def test_a_pattern_is_a_beginning_up_to_a_dot_or_an_end(pattern, module, left_out):
    quantization = Quantization(scheme=MXFP4_SCHEME, excluded=("never.this", pattern))
    assert quantization.excludes(module) is left_out
    assert not Quantization(scheme=MXFP4_SCHEME).excludes(module)
