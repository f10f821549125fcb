"""Old and new spellings of stretched rotary embeddings, each against transformers far beyond the original length."""

import pytest

from moewe.models.config import ConfigError
from moewe.models.families import load_config
from tests.support.comparison import compare_with_reference
from tests.support.fixtures import checkpoint, copy_checkpoint, edit_config, random_prompt
from tests.support.harness import generate, greedy
from tests.support.setups import Setup

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def spelled(scaling=None, *, parameters=None, **changes):
    """T-QW3 with its rotary embedding spelled in the old way (`scaling`) or in that of transformers 5."""
    folder = copy_checkpoint(checkpoint("T-QW3"))
    if parameters is not None:
        return edit_config(folder, rope_parameters=parameters, **changes)
    return edit_config(folder, remove=["rope_parameters"], rope_theta=10000.0, rope_scaling=scaling, **changes)


NEW_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}


# --- P-LOAD-14 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(lambda: spelled({"type": "yarn", **YARN}), id="a-type"),
        pytest.param(lambda: spelled({"rope_type": "yarn", **YARN}), id="b-rope_type"),
        pytest.param(lambda: spelled({"rope_type": "llama3", **LLAMA3}), id="c-llama3"),
        pytest.param(lambda: spelled({"type": "yarn", "rope_type": "yarn", **YARN}), id="both-agreeing"),
        pytest.param(lambda: spelled(parameters=NEW_YARN), id="e-rope_parameters"),
        pytest.param(lambda: spelled({"type": "linear", "factor": 4.0}), id="linear"),
        pytest.param(lambda: spelled({"type": "yarn", "attention_factor": 1.3, **YARN}), id="attention_factor"),
        pytest.param(lambda: spelled({"type": "yarn", "beta_fast": 16, "beta_slow": 2, **YARN}), id="beta"),
    ],
)
def test_every_spelling_equals_transformers_at_position_200(folder):
    path = folder()
    setup = Setup(topology="EP2DP1", max_chunk_tokens=64)
    outcome = generate(path, [random_prompt(200)], setup=setup, params=greedy(8)).outcomes[0]
    compare_with_reference(path, outcome)


def test_three_spellings_mean_the_same():
    configs = [
        load_config(folder)
        for folder in (
            spelled({"type": "yarn", **YARN}),
            spelled({"rope_type": "yarn", **YARN}),
            spelled(parameters=NEW_YARN),
        )
    ]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rotary.scaling.kind == "yarn" and configs[0].rotary.scaling.factor == 4.0


def test_kinds_that_disagree_are_refused():  # d
    with pytest.raises(ConfigError) as caught:
        load_config(spelled({"type": "yarn", "rope_type": "linear", **YARN}))
    assert "yarn" in str(caught.value) and "linear" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_longest_text_follows_the_stretch_where_the_config_gives_the_old_length(key):
    assert load_config(spelled({key: "yarn", **YARN}, max_position_embeddings=64)).max_position_embeddings == 256


def test_a_length_that_is_stretched_already_is_not_stretched_again():
    assert load_config(checkpoint("T-DS2", max_position_embeddings=2560)).max_position_embeddings == 2560
    assert load_config(spelled({"type": "yarn", **YARN}, max_position_embeddings=256)).max_position_embeddings == 256


@pytest.mark.parametrize("name", ["T-DS2", "T-DS3", "T-GOS"])
def test_yarn_of_latent_and_of_windowed_models_at_position_200(name):
    path = checkpoint(name)
    setup = Setup(topology="EP2DP1", max_chunk_tokens=64)
    outcome = generate(path, [random_prompt(200)], setup=setup, params=greedy(8)).outcomes[0]
    compare_with_reference(path, outcome)


def test_the_old_spelling_of_longrope():
    """As Phi-3.5-MoE's config.json has it: the original length stands beside the factors or above them."""
    path = checkpoint("T-PHI")
    new = load_config(path)
    scaling = {
        "type": "longrope",
        "short_factor": list(new.rotary.scaling.short_factors),
        "long_factor": list(new.rotary.scaling.long_factors),
        "short_mscale": 1.1,
        "long_mscale": 1.24,
    }
    for inside in (True, False):
        place = {"original_max_position_embeddings": 40}
        folder = edit_config(
            copy_checkpoint(path),
            remove=["rope_parameters", *(place if inside else ())],
            rope_theta=10000.0,
            rope_scaling=scaling | (place if inside else {}),
            **({} if inside else place),
        )
        assert load_config(folder).rotary == new.rotary
