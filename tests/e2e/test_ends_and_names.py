"""Several end tokens, and models whose class name says little: what a whole runtime makes of them."""

import pytest

from tests.support.chain import chain
from tests.support.comparison import compare_with_reference
from tests.support.fixtures import checkpoint, copy_checkpoint, edit_config, edit_json, random_prompt
from tests.support.harness import generate, greedy


# --- P-TOK-06 ---------------------------------------------------------------------------------------------------------
def test_every_end_token_of_the_generation_config_ends():
    script = chain([5, 9, 7], eos_token_ids=[2, 9])
    run = generate(script.path, [[40], [41, 42]], params=greedy(10, ignore_eos=False))
    for outcome in run.outcomes:
        assert (outcome.tokens, outcome.finish_reason) == ([5, 9], "stop")


def test_end_tokens_of_the_config_serve_where_the_generation_config_has_none():
    script = chain([5, 9, 7], eos_token_ids=None)
    (script.path / "generation_config.json").unlink()
    edit_config(script.path, eos_token_id=[2, 9])
    (outcome,) = generate(script.path, [[40]], params=greedy(10, ignore_eos=False)).outcomes
    assert (outcome.tokens, outcome.finish_reason) == ([5, 9], "stop")


# --- P-LOAD-26 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["T-MIX", "T-DS3", "T-GOS", "T-LL4"])
@pytest.mark.parametrize("architectures", ["absent", None, ["FooForCausalLM"]], ids=str)
def test_a_known_model_type_is_enough(name, architectures):
    plain = checkpoint(name)
    folder = copy_checkpoint(plain)
    if architectures == "absent":
        edit_json(folder / "config.json", {}, ["architectures"])
    else:
        edit_config(folder, architectures=architectures)
    (outcome,) = generate(folder, [random_prompt(33)], params=greedy(4)).outcomes
    compare_with_reference(plain, outcome)
