"""/tokenize and /detokenize, and the routes of other servers that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from moewe.server.protocol.refused_paths import REFUSED
from moewe.server.protocol.token_bodies import MOST_CHARACTERS, MOST_TOKENS
from tests.support.asking import HI, error_of, fake, get, post
from tests.support.fake_replicas import FakeReplicas, make_state, tokenizer

TEXT = "se\u00e9 \U0001f600 </s>"


def test_a_text_goes_there_and_back() -> None:
    tokens, state = tokenizer(), make_state(fake())
    body = post(state, "/tokenize", {"prompt": TEXT}).json()
    ids = tokens.encode(TEXT)
    assert body == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": None}
    bare = post(state, "/tokenize", {"prompt": TEXT, "add_special_tokens": False, "model": "moewe"}).json()
    assert bare["tokens"] == ids[1:]
    assert post(state, "/detokenize", {"tokens": bare["tokens"]}).json() == {"prompt": TEXT}
    assert post(state, "/detokenize", {"tokens": ids}).json() == {"prompt": "<s>" + TEXT}
    assert post(state, "/detokenize", {"tokens": []}).json() == {"prompt": ""}
    strings = post(state, "/tokenize", {"prompt": "a#", "return_token_strs": True}).json()["token_strs"]
    assert strings == ["<s>", "a", "#"]
    assert post(state, "/tokenize", {"prompt": "", "add_special_tokens": False}).json()["count"] == 0


def test_a_text_longer_than_the_context_is_counted() -> None:
    assert post(make_state(fake(), max_model_len=64), "/tokenize", {"prompt": "a" * 100}).json()["count"] == 101


def test_tokens_of_messages_are_those_of_the_chat() -> None:
    replicas = fake()
    state = make_state(replicas)
    turns = [*HI["messages"], {"role": "assistant", "content": "so"}]
    for more in ({}, {"add_generation_prompt": False}, {"add_special_tokens": True},
                 {"messages": turns, "continue_final_message": True}):  # fmt: skip
        replicas.submitted.clear()
        assert post(state, "/v1/chat/completions", HI | {"max_tokens": 1} | more).status_code == 200
        ((prompt, *_),) = replicas.submitted.values()
        assert post(state, "/tokenize", {"messages": HI["messages"]} | more).json()["tokens"] == prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "zzz": 1}, "zzz"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "a" * (MOST_CHARACTERS + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI["messages"], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [5279552648203111001]}, "tokens"),
        ("/detokenize", {"tokens": [5] * (MOST_TOKENS + 1)}, "tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_named(path: str, body: dict[str, Any], param: str) -> None:
    response = post(make_state(fake()), path, body)
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("body", "word"), [({}, "missing"), ({"prompt": "a"} | HI, "exclude each other"), ({"model": "moewe"}, "missing")]
)
def test_a_text_or_messages_are_wanted_and_not_both(body: dict[str, Any], word: str) -> None:
    message = error_of(post(make_state(fake()), "/tokenize", body))["message"]
    assert message.startswith("prompt and messages") and word in message


def test_unknown_model_and_no_tokenizer() -> None:
    state = make_state(FakeReplicas(None, lambda prompt: [5]))
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/tokenize", {"messages": HI["messages"]}),
    ):
        assert post(make_state(fake()), path, body | {"model": "nope"}).status_code == 404
        response = post(state, path, body)
        assert response.status_code == 400 and "without a tokenizer" in error_of(response)["message"]
        assert post(make_state(), path, body).status_code == 503


@pytest.mark.parametrize("path", REFUSED)
def test_routes_of_other_servers_say_what_to_use(path: str) -> None:
    for response in (post(make_state(fake()), path, {"model": "gull", "input": "a"}), get(make_state(fake()), path)):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "unsupported_endpoint" and REFUSED[path] in error["message"]


def test_p_api_14_unknown_models_are_404_and_aliases_work() -> None:
    state = make_state(fake())
    for name in ("gull", "moewe"):
        body = get(state, f"/v1/models/{name}").json()
        assert (body["id"], body["object"], body["root"], body["max_model_len"]) == (name, "model", "gull", 64)
    response = get(state, "/v1/models/nope")
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"
    assert "'gull', 'moewe'" in error_of(response)["message"]
