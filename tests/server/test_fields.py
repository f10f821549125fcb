"""Every field: what reaches the engine, and that the OpenAPI document and docs/api.md say what the server does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types import chat, completion_create_params

from moewe.runtime.params import SamplingParams
from moewe.server.openapi.document import document, refused_on
from moewe.server.openapi.field_origins import DIFFERENCES, OPENAI, OPENAI_PACKAGE, VLLM_LACKS, VLLM_MORE, VLLM_OLD
from moewe.server.openapi.reference import reference
from moewe.server.protocol.field_table import CHAT_ONLY, COMPLETIONS_ONLY, IGNORED, UNSUPPORTED
from moewe.server.protocol.requests import SAMPLING_FIELDS, ChatRequest, CompletionRequest
from moewe.server.protocol.structured_fields import FIELDS as STRUCTURED
from tests.support.asking import HI, error_of, fake, get, post
from tests.support.fake_replicas import CHATML, make_state

ROUTES = {
    "/v1/completions": {"model": "gull", "prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": HI | {"max_tokens": 1},
}
BODIES = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatRequest"}
HONOURED = {*CompletionRequest.model_fields, *ChatRequest.model_fields}

SENT: dict[str, Any] = {
    "n": 2, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {"5": 2}, "stop_token_ids": [7],
    "bad_words": ["no"], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "prompt_logprobs": 2, "seed": 2**64 - 1, "stop": ["x"], "max_tokens": 4,
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_fields_of_sampling_reach_the_engine(path: str) -> None:
    assert set(SAMPLING_FIELDS) <= set(SENT)
    replicas = fake()
    assert post(make_state(replicas), path, ROUTES[path] | SENT).status_code == 200
    first, second = [params for _, params, _ in replicas.submitted.values()]
    expected = SENT | {
        "n": 1,
        "logit_bias": {5: 2.0},
        "seed": -1,
        "stop": ("x",),
        "stop_token_ids": (7,),
        "bad_words": (),
    }
    assert {name: getattr(first, name) for name in expected} == expected
    assert first.bad_word_tokens and second.prompt_logprobs is None and second.seed != first.seed


@pytest.mark.parametrize("path", ROUTES)
def test_null_is_as_good_as_nothing(path: str) -> None:
    replicas = fake()
    nulls = dict.fromkeys(set(CompletionRequest.model_fields if path == "/v1/completions" else ChatRequest.model_fields)
                          - set(ROUTES[path]))  # fmt: skip
    assert post(make_state(replicas), path, ROUTES[path] | nulls).status_code == 200
    ((_, params, _),) = replicas.submitted.values()
    assert params == SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("bias", "named"),
    [({"99999": 5}, "99999"), ({"512": 5}, "512"), ({"abc": 1}, "'abc'"), ({"-1": 1}, "-1"), ({"5": 101}, "101"),
     ({"5": None}, "logit_bias.5"), ({"1" * 30: 1}, "1111"), ({str(i): 0 for i in range(1025)}, "1024")],
)  # fmt: skip
def test_p_api_05_logit_bias_names_the_id_and_the_next_request_runs(bias: dict[str, Any], named: str) -> None:
    state = make_state(fake())
    for path, body in ROUTES.items():
        response = post(state, path, body | {"logit_bias": bias})
        assert response.status_code == 400 and named in error_of(response)["message"]
        assert error_of(response)["param"].startswith("logit_bias")
        assert post(state, path, body | {"logit_bias": {"511": 1}}).status_code == 200


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-1", b"1e400", b'"0"', b"true", b"[]"])
def test_p_api_16_temperatures_that_are_none(value: bytes) -> None:
    for path, body in ROUTES.items():
        data = json.dumps(body | {"temperature": 0}).encode().replace(b'"temperature": 0', b'"temperature": ' + value)
        assert post(make_state(fake()), path, data).status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [("messages", [{"role": "user", "content": ""}] * 400_000), ("tools", [{}] * 1_000_000),
     ("bad_words", ["a"] * 1_000_000), ("logit_bias", {str(i): 0 for i in range(200_000)}),
     ("guided_choice", ["a"] * 1_000_000)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_p_api_19_lists_without_end_are_not_looked_at(field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: Any, **__: Any) -> None:
        raise AssertionError("looked at")

    for name in (
        "server.protocol.requests.checked_tools",
        "server.protocol.requests.asked_structure",
        "runtime.params._token_bias",
    ):
        monkeypatch.setattr(f"moewe.{name}", looked)
    response = post(make_state(fake()), "/v1/chat/completions", HI | {field: value})
    assert response.status_code == 400 and error_of(response)["param"] == field


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "data", [b'{"model":', b"", b"[]", b"1", b"null", b'"a"', b'{"a":' * 100_000, b"\xff\xfe{}", b"{'a': 1}"]
)
def test_p_api_13_bodies_that_are_no_object(path: str, data: bytes) -> None:
    response = post(make_state(fake()), path, data)
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [*ROUTES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("field", ["stop", "user", "model", "prompt", "content", "zzz\\ud800"])
def test_p_api_15_lone_surrogates_are_refused_everywhere(path: str, field: str) -> None:
    data = b'{"model":"gull","prompt":"a","messages":[{"role":"user","content":"a"}],"%s":"a\\ud800b"}' % field.encode()
    response = post(make_state(fake()), path, data)
    assert response.status_code == 400 and "surrogate" in error_of(response)["message"]
    response.text.encode()


# --- lists ------------------------------------------------------------------------------------------------------------
def test_no_field_is_in_two_lists() -> None:
    assert not (HONOURED & set(UNSUPPORTED) or HONOURED & IGNORED or IGNORED & set(UNSUPPORTED))
    assert set(UNSUPPORTED) >= CHAT_ONLY | COMPLETIONS_ONLY and not CHAT_ONLY & COMPLETIONS_ONLY


def test_every_field_has_an_origin() -> None:
    known = OPENAI | VLLM_MORE | VLLM_OLD
    assert known == HONOURED | IGNORED | set(UNSUPPORTED)
    assert set(DIFFERENCES) <= known and VLLM_LACKS <= OPENAI


def test_fields_of_openai_are_those_of_its_package() -> None:
    installed = tuple(int(part) for part in openai.__version__.split(".")[:2])
    known: set[str] = {"stream"}
    for params in (completion_create_params, chat.completion_create_params):
        known |= set(params.CompletionCreateParamsBase.__annotations__)
    if installed >= OPENAI_PACKAGE:  # of an older one, some are not there yet
        assert known >= OPENAI
    if installed <= OPENAI_PACKAGE:  # a newer one may have more
        assert known <= OPENAI


@pytest.mark.parametrize("path", ROUTES)
def test_ignored_fields_are_taken_and_refused_ones_named(path: str) -> None:
    state, body = make_state(fake()), ROUTES[path]
    assert post(state, path, body | {name: {"a": ["b"]} for name in IGNORED}).status_code == 200
    for name, fine in refused_on(path == "/v1/chat/completions").items():
        for value in fine:
            assert post(state, path, body | {name: value}).status_code == 200, name
        response = post(state, path, body | {name: {"a": 1}})
        assert response.status_code == 400 and error_of(response)["param"] == name, name


def test_fields_of_the_other_route_are_named_with_that_route() -> None:
    for path, other in (("/v1/completions", "/v1/chat/completions"), ("/v1/chat/completions", "/v1/completions")):
        theirs = document()["components"]["schemas"][BODIES[other]]["properties"]
        ours = document()["components"]["schemas"][BODIES[path]]["properties"]
        for name in set(theirs) - set(ours):
            response = post(make_state(fake()), path, ROUTES[path] | {name: 1})
            assert response.status_code == 400 and other in error_of(response)["message"], name
            assert post(make_state(fake()), path, ROUTES[path] | {name: None}).status_code == 200, name


# --- document ---------------------------------------------------------------------------------------------------------
def test_reference_is_what_the_tables_make() -> None:
    written = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    assert written == reference(), "run `make api`"


def edges() -> list[tuple[str, str, Any, Any]]:
    """(path, field, a value that is just allowed, one that is not) of each limit that the document tells."""
    found = []
    for path, name in BODIES.items():
        for field, schema in document()["components"]["schemas"][name]["properties"].items():
            whole = "'integer'" in str(schema)
            step = 1 if whole else 0.001
            for limit, sign in (("minimum", -1), ("maximum", 1)):
                if limit in schema:
                    found.append((path, field, schema[limit], schema[limit] + sign * step))
            if "exclusiveMinimum" in schema:
                found.append((path, field, schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"]))
            if "maxItems" in schema and field not in ("tools", "messages", "guided_choice"):
                entry = 5 if field == "stop_token_ids" else "ab"
                found.append((path, field, [entry] * schema["maxItems"], [entry] * (schema["maxItems"] + 1)))
            if "minItems" in schema and field != "messages":
                found.append((path, field, ["a"] * schema["minItems"], []))
    return found


@pytest.mark.parametrize(("path", "field", "inside", "outside"), edges())
def test_limits_are_those_that_are_checked(path: str, field: str, inside: Any, outside: Any) -> None:
    more = {"max_tokens": {"echo": True}, "top_logprobs": {"logprobs": True}, "best_of": {"n": inside}}.get(field, {})
    state, body = make_state(fake(), max_model_len=512), {k: v for k, v in ROUTES[path].items() if k != "max_tokens"}
    if path == "/v1/chat/completions":
        more.pop("echo", None)
    state.hub.most_live = 200
    response = post(state, path, body | more | {field: inside})
    if field != "priority":  # any but 0 needs a policy that this server does not have
        assert response.status_code == 200, response.text
    response = post(state, path, body | {k: v for k, v in more.items() if k != "n"} | {field: outside})
    assert response.status_code == 400 and error_of(response)["param"] == field


def test_document_is_sound_and_answers_keep_to_it() -> None:
    state = make_state(fake(), api_keys=("key",))
    key = {"authorization": "Bearer key"}
    content = get(state, "/openapi.json", headers=key).json()
    assert content["openapi"].startswith("3.1") and content["components"]["securitySchemes"]
    assert content["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}]
    assert content["paths"]["/health"]["get"]["security"] == []
    assert "securitySchemes" not in get(make_state(fake()), "/openapi.json").json()["components"]
    schemas = content["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["gull", "moewe"]
    assert (
        set(HONOURED) - set(schemas["ChatRequest"]["properties"]) - set(schemas["CompletionRequest"]["properties"])
        == set()
    )
    asked = {"max_tokens": 1, "n": 2, "logprobs": True, "prompt_logprobs": 1, "return_token_ids": True}
    for path, method, body in [
        ("/v1/completions", "post", ROUTES["/v1/completions"] | asked | {"logprobs": 1}),
        ("/v1/chat/completions", "post", HI | asked),
        ("/tokenize", "post", {"prompt": "a", "return_token_strs": True}),
        ("/tokenize", "post", {"messages": HI["messages"]}),
        ("/detokenize", "post", {"tokens": [65]}),
        ("/v1/models", "get", None), ("/v1/topology", "get", None), ("/health", "get", None), ("/version", "get", None),
    ]:  # fmt: skip
        response = post(state, path, body, headers=key) if method == "post" else get(state, path, headers=key)
        assert response.status_code == 200, response.text
        valid(schemas, content["paths"][path][method]["responses"]["200"], response.json())
        if body is not None:
            valid(schemas, content["paths"][path][method]["requestBody"], body)
            refused = post(state, path, body | {"zzz": 1}, headers=key)
            valid(schemas, content["paths"][path][method]["responses"]["400"], refused.json())
            with pytest.raises(jsonschema.ValidationError):
                valid(schemas, content["paths"][path][method]["requestBody"], body | {"zzz": 1})


def valid(schemas: dict[str, Any], part: dict[str, Any], value: Any) -> None:
    schema = part["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": {"schemas": schemas}}).validate(value)


def test_page_shows_every_field_and_loads_nothing_from_elsewhere() -> None:
    response = get(make_state(fake(), api_keys=("key",)), "/docs")
    assert response.status_code == 200 and "default-src 'none'" in response.headers["content-security-policy"]
    assert all(f"<code>{name}</code>" in response.text for name in HONOURED | IGNORED | set(UNSUPPORTED))
    assert "<script" not in response.text and "//" not in response.text and "gull" not in response.text
    assert "<style" not in response.text and "style=" not in response.text
    style = get(make_state(fake(), api_keys=("key",)), "/static/docs.css")
    assert style.status_code == 200 and "url(" not in style.text and "@import" not in style.text


# --- chats ------------------------------------------------------------------------------------------------------------
def prompt_of(body: dict[str, Any], template: str = CHATML) -> str:
    replicas = fake()
    state = make_state(replicas, template=template)
    response = post(state, "/v1/chat/completions", {"model": "gull", "max_tokens": 1} | body)
    assert response.status_code == 200, response.text
    ((ids, *_),) = replicas.submitted.values()
    return state.tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[union-attr]


def test_last_message_may_be_left_open() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    assert prompt_of({"messages": turns}) == "<|user|>hi\n<|assistant|>Well, \n<|assistant|>"
    open_turn = {"messages": turns, "continue_final_message": True}
    assert (
        prompt_of(open_turn)
        == prompt_of(open_turn | {"add_generation_prompt": False})
        == "<|user|>hi\n<|assistant|>Well, "
    )
    parts = [turns[0], {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    assert prompt_of(open_turn | {"messages": parts}) == "<|user|>hi\n<|assistant|>Well, "
    state = make_state(fake())
    for wrong in ({"add_generation_prompt": True}, {"messages": turns[:1]}):
        response = post(state, "/v1/chat/completions", {"model": "gull"} | open_turn | wrong)
        assert response.status_code == 400 and error_of(response)["param"] == "continue_final_message"
    state = make_state(fake(), template="{{ messages | length }}")
    response = post(state, "/v1/chat/completions", {"model": "gull"} | open_turn)
    assert response.status_code == 400 and "does not show" in error_of(response)["message"]


def test_developer_reaches_templates_that_do_not_know_the_role_as_system() -> None:
    turns = {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    assert prompt_of(turns).startswith("<|system|>be brief\n")
    knows = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}{{ m.role }}{% endfor %}"
    assert prompt_of(turns, knows) == "!developeruser"


def test_reasoning_effort_reaches_templates_that_read_it_and_is_refused_else() -> None:
    reading = "{{ reasoning_effort | default('none') }}:{{ messages[0].content }}"
    assert prompt_of(HI | {"reasoning_effort": "high"}, reading) == "high:hi"
    assert prompt_of(HI, reading) == "none:hi"
    both = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
    for template, body in (
        (CHATML, {"reasoning_effort": "high"}),
        (reading, both),
        (reading, {"reasoning_effort": "x"}),
    ):
        response = post(make_state(fake(), template=template), "/v1/chat/completions", HI | body)
        assert response.status_code == 400 and error_of(response)["param"] == "reasoning_effort"


def test_structured_fields_are_among_those_described() -> None:
    assert set(STRUCTURED) <= HONOURED
