"""What the model's generation_config.json changes for clients, and what they send wins over."""

from __future__ import annotations

from typing import Any

import pytest

from moewe.runtime.generation_defaults import GenerationDefaults
from moewe.runtime.params import SamplingParams
from tests.support.asking import HI, error_of, fake, post
from tests.support.fake_replicas import make_state, tokenizer

FILE = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "max_tokens": 5}
TEXT = {"model": "gull", "prompt": "x"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def used(path: str, body: dict[str, Any], **options: Any) -> SamplingParams:
    replicas = fake()
    assert post(make_state(replicas, **options), path, body).status_code == 200
    ((_, params, _),) = replicas.submitted.values()
    assert isinstance(params, SamplingParams)
    return params


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETIONS, TEXT)])
def test_defaults_hold_where_a_field_is_left_out(path: str, body: dict[str, Any]) -> None:
    params = used(path, body, defaults=FILE)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 7)
    params = used(path, body | {"temperature": 0, "top_k": 0, "top_p": 1, "max_tokens": 2}, defaults=FILE)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 1, 0, 2)
    params = used(path, body | {"temperature": None}, defaults=FILE)
    assert params.temperature == 0.6
    assert used(path, body).temperature == 1.0


def test_the_models_limit_is_for_chats_and_gives_way_to_the_context() -> None:
    assert used(CHAT, HI, defaults=FILE).max_tokens == 5
    assert used(CHAT, HI).max_tokens is None
    assert used(COMPLETIONS, TEXT, defaults=FILE).max_tokens == 16  # OpenAI's own default
    prompt = len(tokenizer().encode("<|user|>hi\n<|assistant|>", add_special_tokens=False))
    assert used(CHAT, HI, defaults={"max_tokens": 1000}).max_tokens == 64 - prompt


def test_a_value_of_the_client_is_blamed_by_its_own_name() -> None:
    response = post(make_state(fake(), defaults=FILE), CHAT, HI | {"top_p": 2})
    assert response.status_code == 400 and error_of(response)["param"] == "top_p"


def test_defaults_are_not_shared_between_requests() -> None:
    defaults = GenerationDefaults(sampling=dict(FILE))
    defaults.params({"temperature": 0.0}, room=1)
    assert defaults.sampling == FILE


# --- special tokens ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "extra", "num_bos"),
    [
        (CHAT, {}, 1),
        (CHAT, {"add_special_tokens": False}, 1),
        (CHAT, {"add_special_tokens": True}, 1),  # the tokenizer sees that the text begins with it already
        (COMPLETIONS, {}, 1),
        (COMPLETIONS, {"prompt": "<s>x"}, 1),
        (COMPLETIONS, {"add_special_tokens": False}, 0),
    ],
)
def test_a_prompt_has_one_bos(path: str, extra: dict[str, Any], num_bos: int) -> None:  # P-TOK-03
    replicas = fake()
    body = {**(HI if path == CHAT else TEXT), "max_tokens": 1, **extra}
    state = make_state(replicas, template="{{ bos_token }}{{ messages[0].content }}")
    usage = post(state, path, body).json()["usage"]
    ((prompt, *_),) = replicas.submitted.values()
    assert list(prompt).count(tokenizer().bos_token_id) == num_bos
    assert usage["prompt_tokens"] == len(prompt)


def test_add_special_tokens_is_honoured_for_a_template_without_bos() -> None:  # P-TOK-03
    for asked, num_bos in ((None, 0), (False, 0), (True, 1)):
        replicas = fake()
        state = make_state(replicas, template="{{ messages[0].content }}")
        post(state, CHAT, HI | {"max_tokens": 1, "add_special_tokens": asked})
        ((prompt, *_),) = replicas.submitted.values()
        assert list(prompt).count(tokenizer().bos_token_id) == num_bos


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"a b": 1}, {"x": "a" * 70_000}, {"tokenize": True}])
def test_template_variables_that_cannot_be_are_refused(kwargs: dict[str, Any]) -> None:
    response = post(make_state(fake()), CHAT, HI | {"chat_template_kwargs": kwargs})
    assert response.status_code == 400 and error_of(response)["param"] == "chat_template_kwargs"
