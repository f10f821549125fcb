"""Echo and log-probabilities of prompts, P-API-01, in the shapes of answers (numbers: e2e/test_server_fields.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.asking import HI, error_of, events, fake, post
from tests.support.fake_replicas import FakeReplicas, make_state, tokenizer

IDS = [65, 66, 67, 68]
ASKED: dict[str, Any] = {"model": "gull", "prompt": IDS, "echo": True, "max_tokens": 1}


def choices(body: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    response = post(make_state(fake(**kwargs)), "/v1/completions", body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


@pytest.mark.parametrize("new", [0, 1])
def test_p_api_01_echo_has_an_entry_for_each_token_and_null_first(new: int) -> None:
    (choice,) = choices(ASKED | {"logprobs": 1, "max_tokens": new})
    logprobs = choice["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        4 + new
    ] * 4
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (3 + new) and logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choice["text"] and choice["finish_reason"] == "length"
    assert choice["text"].startswith(tokenizer().decode(IDS)) and logprobs["text_offset"][0] == 0


def test_usage_of_an_echo_counts_nothing_new() -> None:
    state = make_state(fake())
    body = post(state, "/v1/completions", ASKED | {"max_tokens": 0}).json()
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    assert body["choices"][0]["text"] == tokenizer().decode(IDS) and body["choices"][0]["logprobs"] is None
    assert state.metrics.totals.prompt_tokens == 4


def test_no_tokens_without_echo_are_refused_on_both_routes() -> None:
    for path, body in (("/v1/completions", ASKED | {"echo": False}), ("/v1/chat/completions", HI)):
        response = post(make_state(fake()), path, body | {"max_tokens": 0})
        assert response.status_code == 400 and error_of(response)["param"] == "max_tokens"


def test_echo_of_a_text_is_that_text_and_special_tokens_take_no_place() -> None:
    (choice,) = choices(ASKED | {"prompt": "se\u00e9 \U0001f600", "logprobs": 0})
    assert choice["text"].startswith("se\u00e9 \U0001f600")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "<s>" and logprobs["text_offset"][:2] == [0, 0]
    # The parts of a character begin where the character does.
    tokens = tokenizer()
    ids = tokens.encode("se\u00e9 \U0001f600", add_special_tokens=False)
    data = [tokens.token_bytes(token) for token in ids]
    before = [b"".join(data[:place]).decode("utf-8", "ignore") for place in range(len(ids))]
    assert logprobs["text_offset"][1:-1] == [len(text) for text in before] and len(set(before)) < len(before)
    assert logprobs["text_offset"][-1] == 5


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_streamed_echo_adds_up_to_the_whole(n: int, logprobs: int | None) -> None:
    asked = ASKED | {"prompt": ["ab", "c"], "n": n, "max_tokens": 2, "logprobs": logprobs}
    whole = choices(asked)
    texts = [""] * len(whole)
    lists: list[dict[str, list[Any]]] = [{} for _ in whole]
    for chunk in events(post(make_state(fake()), "/v1/completions", asked | {"stream": True}))[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            lists[choice["index"]].setdefault(name, []).extend(values or [])
    assert texts == [choice["text"] for choice in whole] and texts[0].startswith("ab") and texts[-1].startswith("c")
    assert lists == [choice["logprobs"] or {} for choice in whole]


def test_prompt_logprobs_are_tables_by_id() -> None:
    asked = ASKED | {"echo": False, "prompt_logprobs": 1, "n": 2}
    for choice in choices(asked):
        table = choice["prompt_logprobs"]
        assert table[0] is None and len(table) == 4
        assert table[1] == {
            "66": {"logprob": -0.5, "rank": 2, "decoded_token": tokenizer().token_text(66)},
            "67": {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer().token_text(67)},
        }
    body = post(make_state(fake()), "/v1/chat/completions", HI | {"max_tokens": 1, "prompt_logprobs": 0}).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"] and body["prompt_logprobs"][0] is None
    response = post(make_state(fake()), "/v1/completions", asked | {"stream": True})
    assert response.status_code == 400 and error_of(response)["param"] == "prompt_logprobs"


def test_echo_of_one_token_waits_for_nothing() -> None:
    asked = ASKED | {"prompt": [65], "logprobs": 1}
    (choice,) = choices(asked)
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    streamed = events(post(make_state(fake()), "/v1/completions", asked | {"stream": True}))
    assert streamed[0]["choices"][0]["logprobs"]["token_logprobs"] == [None] and streamed[-1] == "DONE"


def test_prompt_may_fill_the_context_when_nothing_is_to_come() -> None:
    state = make_state(fake(), max_model_len=64)
    assert post(state, "/v1/completions", ASKED | {"prompt": [5] * 64, "max_tokens": 0}).status_code == 200
    assert post(state, "/v1/completions", ASKED | {"prompt": [5] * 65, "max_tokens": 0}).status_code == 400


def test_p_api_02_infinite_logprobs_are_valid_json() -> None:
    response = post(make_state(fake()), "/v1/completions", ASKED | {"logprobs": 5, "top_k": 1})
    logprobs = json.loads(response.text, parse_constant=lambda word: pytest.fail(word))["choices"][0]["logprobs"]
    assert min(logprobs["top_logprobs"][-1].values()) == -9999.0


def test_echo_without_tokenizer_names_ids() -> None:
    state = make_state(FakeReplicas(None, lambda prompt: [5] * 9))
    (choice,) = post(state, "/v1/completions", ASKED | {"logprobs": 0}).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:65", "token_id:66", "token_id:67", "token_id:68", "token_id:5"]
