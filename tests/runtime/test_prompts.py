"""What the tokenizer says of a model: the template in use and the tokens that end a text; and which ids are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.runtime.config import EngineConfig, ModelOptions
from moewe.runtime.plan import unpack
from moewe.runtime.prompts import check_token_ids, model_template, model_tokenizer, packed, with_ends
from moewe.runtime.resolve import Resolved, resolve
from tests.support.chain import EOS, chain
from tests.support.fixtures import edit_json


def resolved(path: Path) -> Resolved:
    return resolve(EngineConfig(model=ModelOptions(model=str(path), path=str(path))))


@pytest.mark.parametrize(("ids", "ends"), [([2, 9], (2, 9)), ([9], (9, 2)), (9, (9, 2)), (2, (2,)), (None, (2,))])
def test_a_text_ends_at_every_end_token_that_is_named(ids: object, ends: tuple[int, ...]) -> None:  # P-TOK-06
    path = chain(["a"], eos_token_ids=ids).path  # type: ignore[arg-type]
    tokenizer = model_tokenizer(ModelOptions(model=str(path), path=str(path)))
    assert with_ends(resolved(path), tokenizer).model.eos_token_ids == ends
    assert with_ends(resolved(path), None, (5, 10**6)).model.eos_token_ids[-1] == 5


def test_an_end_token_without_a_row_is_left_out() -> None:
    path = chain(["a"]).path
    edit_json(path / "tokenizer_config.json", {"eos_token": "<far>"})
    edit_json(path / "tokenizer_config.json", {"added_tokens_decoder": {str(2**20): {"content": "<far>"}}})
    tokenizer = model_tokenizer(ModelOptions(model=str(path), path=str(path)))
    assert tokenizer is not None and tokenizer.eos_token_id is not None
    found = with_ends(resolved(path), tokenizer).model
    assert all(token < found.vocab_size for token in found.eos_token_ids) and EOS in found.eos_token_ids


def test_the_template_asked_for_wins_over_the_models_own(tmp_path: Path) -> None:
    path = chain(["a"], chat_template="own").path
    (tmp_path / "t.jinja").write_text("file")

    def used(value: str | None) -> str | None:
        model = ModelOptions(model=str(path), path=str(path), chat_template=value)
        template = model_template(model, model_tokenizer(model))
        return None if template is None else template.source

    assert (used(None), used(str(tmp_path / "t.jinja")), used("{{ 1 }}"), used("default")) == (
        "own",
        "file",
        "{{ 1 }}",
        "own",
    )
    with pytest.raises(ValueError, match="it has: default"):
        used("other")
    assert model_template(ModelOptions(model="m", path="m"), None) is None


@pytest.mark.parametrize("bad", [-1, 512, 1 << 40, True, 1.0, "1"])
def test_what_is_no_token_id_is_refused_by_place_and_value(bad: object) -> None:
    check_token_ids([0, 511], 512)
    with pytest.raises(ValueError, match=r"prompt_token_ids\.1.*(use 0 to 511|an integer)") as refused:
        check_token_ids([1, bad], 512)
    assert repr(bad) in str(refused.value)


def test_an_id_of_thousands_of_digits_is_not_spelled_out() -> None:
    with pytest.raises(ValueError, match=r"prompt_token_ids\.0 \(of 33220 bits\) is no token id"):
        check_token_ids([10**10000], 512)


def test_a_packed_prompt_is_its_ids() -> None:
    assert unpack(packed([0, 511, 2**31 - 1])).tolist() == [0, 511, 2**31 - 1]
