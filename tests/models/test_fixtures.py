"""The fixtures themselves, against transformers alone: scripted chains say their script, greedy choices are clear."""

import pytest
from transformers import AutoTokenizer

from tests.support.chain import EOS, FIRST_ID, byte_id, chain
from tests.support.fixtures import FIXTURES, checkpoint, random_prompt, reference_gaps, reference_greedy


@pytest.mark.parametrize("name", FIXTURES)
def test_greedy_choices_of_fixtures_are_clear(name):
    assert min(reference_gaps(checkpoint(name), random_prompt(33), 16)) > 1e-3


def test_a_chain_says_its_script_after_any_prompt():
    script = ["AB", "CD", "AB", b"\xf0\x9f\x98\x80", b"\xc4\x8f", " ab ", "<|tag|>", "ü<0x41>", 5, 9, 7]
    made = chain(script)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    assert made.text == "ABCDAB😀ď ab <|tag|>ü<0x41>\x02\x06\x04" == tokenizer.decode(made.token_ids[:-1])
    for prompt in ("x", "Hé, AB <s> 😀", "5"):
        ids = tokenizer(prompt).input_ids
        assert all(token < FIRST_ID for token in ids) and tokenizer.decode(ids) == prompt
        assert reference_greedy(made.path, ids, len(made.token_ids)) == made.token_ids
    assert made.token_ids[-4:] == [5, 9, 7, EOS]
    assert reference_gaps(made.path, [byte_id(65)], 1)[0] > 100


def test_a_looping_chain_goes_on():
    made = chain(["a", "b"], loop=True)
    assert reference_greedy(made.path, [byte_id(65)], 5) == [FIRST_ID, FIRST_ID + 1] * 2 + [FIRST_ID]


def test_a_chain_is_first_order():
    with pytest.raises(ValueError):
        chain([5, "a", 5])
