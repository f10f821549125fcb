"""Rotary scaling of a config.json, against the numbers of transformers: kinds, spellings, lengths, contradictions."""

import math

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moewe.models.config import RotaryScaling
from moewe.models.families import load_config
from tests.support.configs import DELETE, edited_config, reference_config, refusal, saved_config

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}
ALL_KINDS = [
    ("linear", {"factor": 3.0}),
    ("yarn", YARN),
    ("yarn", YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}),
    ("yarn", YARN | {"mscale": 1.2, "mscale_all_dim": 0.0}),
    ("yarn", YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
    ("yarn", {"factor": 1.0}),
    ("llama3", LLAMA3),
    ("longrope", LONGROPE),
    ("longrope", LONGROPE | {"factor": 1.0}),
    ("longrope", LONGROPE | {"attention_factor": 1.25}),
]
# What stands in place of the default section of a fixture.
OLD = {"rope_parameters": DELETE, "rope_theta": 10000.0}


def rotary(folder):
    return load_config(folder).rotary


@pytest.mark.parametrize(("kind", "fields"), ALL_KINDS, ids=str)
def test_numbers_of_a_kind_are_those_of_transformers(kind, fields):
    section = {"rope_type": kind, "rope_theta": 10000.0} | fields
    config = reference_config("T-QW3", max_position_embeddings=512, rope_parameters=section)
    _, amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    read = rotary(saved_config("T-QW3", max_position_embeddings=512, rope_parameters=section))
    assert read.theta == 10000.0 and read.rotary_dim == 32 and read.scaling.kind == kind
    assert read.scaling.amplitude == pytest.approx(amplitude, rel=1e-12)
    assert read.scaling.factor == fields.get("factor", 512 / 64)
    assert read.scaling.original_max_position == (
        0 if kind == "linear" else fields.get("original_max_position_embeddings", 512)
    )


def test_defaults_of_the_kinds():
    read = rotary(edited_config("T-QW3", **OLD, rope_scaling={"type": "yarn"} | YARN)).scaling
    assert (read.beta_fast, read.beta_slow, read.truncate) == (32.0, 1.0, True)
    assert read.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    read = rotary(edited_config("T-QW3", **OLD, rope_scaling={"type": "llama3"} | LLAMA3)).scaling
    assert (read.low_freq_factor, read.high_freq_factor, read.factor) == (1.0, 4.0, 8.0)
    read = rotary(edited_config("T-QW3", **OLD, rope_scaling={"type": "longrope"} | LONGROPE)).scaling
    assert (read.short_factors, read.long_factors) == ((1.0,) * 16, (2.0,) * 16)
    assert read.factor == 64.0 and read.long_amplitude == read.amplitude
    # Equal ends of the ramp, as Llama 4 has them.
    equal = LLAMA3 | {"high_freq_factor": 1.0}
    assert rotary(edited_config("T-QW3", **OLD, rope_scaling={"type": "llama3"} | equal)).scaling.high_freq_factor == 1


@pytest.mark.parametrize(
    "spelling",
    [
        OLD | {"rope_scaling": {"type": "yarn"} | YARN},
        OLD | {"rope_scaling": {"rope_type": "yarn"} | YARN},
        OLD | {"rope_scaling": {"rope_type": "yarn", "type": "yarn"} | YARN},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0} | YARN},
        {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"type": "yarn"} | YARN},
        {"rope_parameters": {"rope_type": "yarn"} | YARN, "rope_scaling": {"type": "yarn", "factor": 4}},
        OLD | {"original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        OLD | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ],
)
def test_all_spellings_of_yarn_mean_the_same(spelling):  # P-LOAD-14 a, b, e
    config = load_config(edited_config("T-QW3", max_position_embeddings=64, **spelling))
    amplitude = 0.1 * math.log(4) + 1
    assert config.rotary.theta == 10000.0 and config.max_position_embeddings == 256
    assert config.rotary.scaling == RotaryScaling(
        kind="yarn", factor=4.0, original_max_position=64, amplitude=amplitude
    )


@pytest.mark.parametrize(
    ("kind", "fields", "stated", "derived"),
    [
        ("yarn", YARN, 64, 256),
        ("yarn", YARN, 256, 256),  # says the stretched length already
        ("yarn", YARN, 80, 256),
        ("yarn", YARN, 4096, 4096),
        ("yarn", {"original_max_position_embeddings": 64}, 256, 256),  # the factor is what the lengths say
        ("llama3", LLAMA3, 64, 64),
        ("llama3", LLAMA3, 4096, 4096),
        ("linear", {"factor": 4.0}, 64, 64),
        ("linear", {"factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ("longrope", LONGROPE, 4096, 4096),
    ],
)
def test_longest_sequence_is_stretched_once(kind, fields, stated, derived):  # P-LOAD-14
    folder = edited_config("T-QW3", **OLD, max_position_embeddings=stated, rope_scaling={"type": kind} | fields)
    config = load_config(folder)
    assert config.max_position_embeddings == derived
    assert config.rotary.scaling.factor == fields.get("factor", stated / 64)


def test_scores_of_latent_attention_grow_with_the_stretch():
    section = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    for mscale in (0.707, 1.0):
        folder = edited_config("T-DS3", rope_parameters=section | {"mscale": 1.0, "mscale_all_dim": mscale})
        scale = 24**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2
        assert load_config(folder).attention_scale == pytest.approx(scale, rel=1e-12)
    for fields in ({}, {"mscale": 1.0}, {"mscale": 1.0, "mscale_all_dim": 0.0}):
        config = load_config(edited_config("T-DS3", rope_parameters=section | fields))
        assert config.attention_scale == 24**-0.5
        assert config.rotary.scaling.amplitude == pytest.approx(0.1 * math.log(40) + 1)
    # Elsewhere it changes the amplitude only.
    folder = edited_config("T-QW3", rope_parameters=section | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert load_config(folder).attention_scale == 32**-0.5 and rotary(folder).scaling.amplitude == 1


def test_phimoe_has_amplitudes_of_its_own():
    read = rotary(saved_config("T-PHI")).scaling
    assert (read.amplitude, read.long_amplitude, read.original_max_position) == (1.1, 1.24, 40)
    section = {
        "type": "longrope",
        "short_factor": [1] * 8,
        "long_factor": [2] * 8,
        "short_mscale": 1.2,
        "long_mscale": 1.3,
    }
    folder = edited_config("T-PHI", **OLD, rope_scaling=section, original_max_position_embeddings=40)
    read = rotary(folder).scaling
    assert (read.amplitude, read.long_amplitude, read.original_max_position) == (1.2, 1.3, 40)
    assert "short_mscale is missing" in refusal(
        edited_config("T-PHI", **OLD, rope_scaling={k: v for k, v in section.items() if k != "short_mscale"})
    )
    assert "'yarn'" in refusal(edited_config("T-PHI", **OLD, rope_scaling={"type": "yarn"} | YARN))


def test_a_fixed_alpha_changes_the_base_only():
    released = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    released |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    read = rotary(edited_config("T-HUN", **OLD, rope_scaling=released))
    assert read.theta == pytest.approx(10000.0 * 1000 ** (32 / 30)) and read.scaling is None
    section = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
    assert rotary(saved_config("T-HUN", rope_parameters=section)) == read
    assert load_config(edited_config("T-HUN", rope_parameters=section)).max_position_embeddings == 4096
    assert "alpha is missing" in refusal(edited_config("T-HUN", **OLD, rope_scaling={"type": "dynamic", "factor": 2.0}))


@pytest.mark.parametrize("fixture", ["T-GLM", "T-MM2"])
def test_a_part_of_a_head_rotates(fixture):
    assert rotary(saved_config(fixture)).rotary_dim == 16
    for factor, rotary_dim in ((0.25, 8), (1.0, 32)):
        changes = {"rope_parameters": DELETE, "rotary_dim": DELETE, "rope_theta": 1e4}
        assert rotary(edited_config(fixture, partial_rotary_factor=factor, **changes)).rotary_dim == rotary_dim
        section = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
        changes = {"partial_rotary_factor": DELETE, "rotary_dim": DELETE}
        assert rotary(edited_config(fixture, rope_parameters=section, **changes)).rotary_dim == rotary_dim


REFUSED = {
    "two kinds": (OLD | {"rope_scaling": {"type": "yarn", "rope_type": "llama3"} | YARN}, "contradicts type = 'yarn'"),
    "two sections, kinds": (  # P-LOAD-14 d
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"type": "yarn"} | YARN,
        },
        "rope_parameters: rope_type = 'default' contradicts rope_scaling: rope_type = 'yarn'",
    ),
    "two sections, factors": (
        {"rope_parameters": {"rope_type": "yarn"} | YARN, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope_parameters: factor = 4.0 contradicts rope_scaling: factor = 2.0",
    ),
    "two thetas": ({"rope_theta": 5e5}, "contradicts"),
    "two lengths": (
        OLD | {"rope_scaling": {"type": "yarn"} | YARN, "original_max_position_embeddings": 128},
        "original_max_position_embeddings = 64 contradicts",
    ),
    "unknown kind": (OLD | {"rope_scaling": {"type": "su"}}, "rope_scaling: type = 'su' is a rotary embedding"),
    "kind as a number": (OLD | {"rope_scaling": {"type": 3}}, "type = 3"),
    "dynamic": (OLD | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "no kind": (OLD | {"rope_scaling": {"factor": 2.0}}, "factor = 2.0 stands without a rope_type"),
    "a field of two lines": (
        OLD | {"rope_scaling": {"type": "yarn", "a\nb": []} | YARN},
        r"'a\nb' = [] is not a field",
    ),
    "two sections, a field of two lines": (
        {"rope_parameters": {"rope_type": "yarn", "a\nb": 1} | YARN, "rope_scaling": {"type": "yarn", "a\nb": 2}},
        r"'a\nb' = 1 contradicts rope_scaling: 'a\nb' = 2",
    ),
    "a long field": (OLD | {"rope_scaling": {"type": "yarn", "a" * 1000: 1} | YARN}, "aaa... = 1 is not a field"),
    "empty kind": (OLD | {"rope_scaling": {"type": ""}}, "type = ''"),
    "field of pictures": (OLD | {"rope_scaling": {"type": "default", "mrope_section": [8]}}, "mrope_section"),
    "sections by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    "a list": (OLD | {"rope_scaling": [1]}, "must be an object"),
    "a string": ({"rope_parameters": "yarn"}, "must be an object"),
    "linear without factor": (OLD | {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "llama3 without factor": (
        OLD | {"rope_scaling": {"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}},
        "factor is missing",
    ),
    "llama3 without ends": (OLD | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    "ends in the wrong order": (
        OLD | {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"high_freq_factor": 0.5}},
        "high_freq_factor = 0.5",
    ),
    "turns in the wrong order": (
        OLD | {"rope_scaling": {"type": "yarn"} | YARN | {"beta_fast": 0.5}},
        "beta_fast = 0.5",
    ),
    "factor below one": (OLD | {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor = 0.5"),
    "factor as a string": (OLD | {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
    "theta of yarn": (OLD | {"rope_theta": 1.0, "rope_scaling": {"type": "yarn"} | YARN}, "rope_theta"),
    "truncate": (OLD | {"rope_scaling": {"type": "yarn", "truncate": 1} | YARN}, "truncate = 1"),
    "too few factors": (
        OLD | {"rope_scaling": {"type": "longrope"} | LONGROPE | {"long_factor": [2.0] * 15}},
        "long_factor",
    ),
    "no factors": (OLD | {"rope_scaling": {"type": "longrope"}}, "short_factor is missing"),
    "factors as strings": (
        OLD | {"rope_scaling": {"type": "longrope"} | LONGROPE | {"short_factor": ["1"] * 16}},
        "short_factor",
    ),
    "length before of zero": (
        OLD | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings = 0",
    ),
    "a part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no length": ({"max_position_embeddings": DELETE}, "max_position_embeddings is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_by_name(case):
    changes, expected = REFUSED[case]
    assert expected in refusal(edited_config("T-QW3", **changes))
