"""`quantization_config`: what is accepted for which family, and what is refused."""

import pytest

from moewe.models.families import load_config
from moewe.quant import FP8_BLOCK, MXFP4, Quantization, QuantScheme
from tests.support.configs import edited_config, refusal

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic", "fmt": "e4m3"}


def test_fp8_of_deepseek():
    config = load_config(edited_config("T-DS3", quantization_config=FP8 | {"scale_fmt": None}))
    assert config.quantization == Quantization(scheme=QuantScheme(kind=FP8_BLOCK, block=(128, 64)))
    for name in ("modules_to_not_convert", "ignored_layers"):
        config = load_config(edited_config("T-DS3", quantization_config=FP8 | {name: ["lm_head", "gate"]}))
        assert config.quantization.excluded == ("lm_head", "gate")


def test_mxfp4_of_gpt_oss():
    modules = ["model.layers.*.self_attn", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    config = load_config(edited_config("T-GOS", quantization_config=section))
    assert config.quantization == Quantization(scheme=QuantScheme(kind=MXFP4, block=(1, 32)), excluded=tuple(modules))


def test_without_it_nothing_is_quantised():
    assert load_config(edited_config("T-DS3")).quantization is None
    assert load_config(edited_config("T-DS3", quantization_config=None)).quantization is None


REFUSED = {
    "fp8 of another family": ("T-MIX", FP8, "quant_method = 'fp8' is a quantisation that moewe does not load"),
    "mxfp4 of another family": ("T-DS3", {"quant_method": "mxfp4"}, "(it loads: fp8)"),
    "fp8 of gpt-oss": ("T-GOS", FP8, "(it loads: mxfp4)"),
    "awq": ("T-QW3", {"quant_method": "awq", "bits": 4}, "'awq'"),
    "no method": ("T-DS3", {"weight_block_size": [128, 128]}, "quant_method = None"),
    "method as a list": ("T-DS3", {"quant_method": ["fp8"]}, "quant_method"),
    "a string": ("T-DS3", "fp8", "must be an object"),
    "no block": ("T-DS3", {"quant_method": "fp8"}, "weight_block_size"),
    "block of one number": ("T-DS3", FP8 | {"weight_block_size": [128]}, "weight_block_size"),
    "block of three": ("T-DS3", FP8 | {"weight_block_size": [1, 2, 3]}, "weight_block_size"),
    "block of zero": ("T-DS3", FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
    "block of fractions": ("T-DS3", FP8 | {"weight_block_size": [1.5, 2]}, "weight_block_size"),
    "static activations": ("T-DS3", FP8 | {"activation_scheme": "static"}, "activation_scheme = 'static'"),
    "other fp8": ("T-DS3", FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    "experts in fp4": ("T-DS3", FP8 | {"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    "more than linears": ("T-DS3", FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
    "unknown field": ("T-DS3", FP8 | {"rotation": True}, "rotation = True"),
    "unknown field of two lines": ("T-DS3", FP8 | {"a\nb": True}, r"'a\nb' = True is not a field"),
    "modules as a string": ("T-DS3", FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    "modules as numbers": ("T-DS3", FP8 | {"modules_to_not_convert": [3]}, "modules_to_not_convert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantisations_are_refused_by_name(case):
    fixture, section, expected = REFUSED[case]
    assert expected in refusal(edited_config(fixture, quantization_config=section))
