"""Structured output of a real server on random weights: what it writes parses, validates and ends."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from tests.support import fixtures, small_tokenizers
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["gull", "Möwe"]},
        "flies": {"type": "boolean"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "age", "kind", "flies", "zip"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "bird", "schema": SCHEMA, "strict": True}}
CALL = "<tool_call>"
HI = [{"role": "user", "content": "hi"}]
# Too much for the time a grammar gets: the intersection of automata explodes.
EXPLOSIVE = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(3, 20)]}
HOSTILE: list[dict[str, Any]] = [
    {"guided_json": EXPLOSIVE},
    {"guided_json": {"type": "object", "properties": {"a": "bar"}}},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "strng"}}}},
    {"guided_json": {"type": "string", "pattern": "foo**"}},
    {"guided_json": {"$ref": "#/$defs/none"}},
    {"guided_json": {"$ref": "https://example.com/schema.json"}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"enum": [f"v{i}" for i in range(40_000)]}},
    {"guided_regex": "foo**"},
    {"guided_regex": "(((((a{0,10}){0,10}){0,10}){0,10}){0,10}){0,10}"},
    {"guided_grammar": "nonsense"},
    {"guided_choice": []},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("structured") / "model"
    shutil.copytree(fixtures.checkpoint("T-QW3"), folder)
    write_tokenizer(folder)
    flags = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024")
    flags += ("--tool-call-parser", "hermes")
    with ServerProcess(folder, *flags) as server:
        yield server


def write_tokenizer(folder: Path) -> None:
    for old in folder.glob("*token*"):
        old.unlink()
    small_tokenizers.write(folder, "byte_level", chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([CALL])
    tokenizer.save(str(folder / "tokenizer.json"))


def chat(server: ServerProcess, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name.startswith(("guided", "structured"))}
    return server.client().chat.completions.create(model=NAME, messages=HI, extra_body=extra, **fields)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_keeps_to_its_schema_and_ends_with_it(server: ServerProcess, seed: int) -> None:
    choice = chat(server, response_format=FORMAT, max_tokens=400, temperature=1.0, seed=seed).choices[0]
    assert choice.finish_reason == "stop", choice.message.content
    assert choice.message.content.endswith("}")
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_cut_answer_says_so(server: ServerProcess) -> None:
    choice = chat(server, response_format=FORMAT, max_tokens=5, seed=1).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no (maybe)"]}, r"yes|no \(maybe\)"),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"structured_outputs": {"choice": ["Möwe", "gull"]}}, "Möwe|gull"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": {"enum": [1, None]}}}, "1|null"),
    ],
)
def test_spellings_of_other_servers(server: ServerProcess, fields: dict[str, Any], pattern: str) -> None:
    choice = chat(server, max_tokens=300, seed=3, **fields).choices[0]
    assert re.fullmatch(pattern, choice.message.content), choice.message.content
    assert choice.finish_reason == "stop"


def test_a_json_object_begins_as_one(server: ServerProcess) -> None:
    choice = chat(server, response_format={"type": "json_object"}, max_tokens=60, seed=3).choices[0]
    assert choice.message.content.startswith("{")


def test_log_probabilities_are_numbers_of_json(server: ServerProcess) -> None:
    fields = {"guided_choice": ["aaaa"], "logprobs": 5, "max_tokens": 10, "top_k": 1}
    response = httpx.post(f"{server.url}/v1/completions", json={"model": NAME, "prompt": "x", **fields}, timeout=60)
    assert response.status_code == 200

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    body = json.loads(response.text, parse_constant=refuse)
    assert body["choices"][0]["text"] == "aaaa"
    assert all(-1e5 < value <= 0 for value in body["choices"][0]["logprobs"]["token_logprobs"])


def test_choices_and_streams_keep_to_it(server: ServerProcess) -> None:
    stream = chat(server, response_format=FORMAT, max_tokens=400, n=3, seed=5, stream=True)
    texts, reasons = ["", "", ""], ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert reasons == ["stop"] * 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_mixed_requests_at_once(server: ServerProcess) -> None:
    wrong: list[str] = []

    def ask(number: int) -> None:
        try:
            if number % 4 == 0:
                choice = chat(server, response_format=FORMAT, max_tokens=400, seed=number).choices[0]
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            elif number % 4 == 1:
                choice = chat(server, guided_regex=f"x{number}[a-f]{{8}}", max_tokens=60, seed=number).choices[0]
                assert re.fullmatch(f"x{number}[a-f]{{8}}", choice.message.content), choice
            elif number % 4 == 2:
                answer = chat(server, max_tokens=number + 1, seed=number)
                assert answer.choices[0].finish_reason == "stop" or answer.usage.completion_tokens == number + 1
            else:
                with pytest.raises(openai.BadRequestError):
                    chat(server, guided_regex=f"x{number}**", max_tokens=10)
        except BaseException as error:
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    server.wait_idle(20)


def test_hostile_grammars_are_refused_while_a_stream_goes_on(server: ServerProcess) -> None:
    bodies = [{"model": NAME, "prompt": "x", "max_tokens": 5, **fields} for fields in HOSTILE]
    stream = server.client().completions.create(
        model=NAME, prompt="x", max_tokens=900, seed=1, stream=True, extra_body={"ignore_eos": True}
    )
    statuses: list[int] = []

    def attack() -> None:
        for body in bodies:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            statuses.append(answer.status_code)
            assert answer.json()["error"]["param"].startswith("guided_")

    attacker = threading.Thread(target=attack)
    attacker.start()
    chunks = sum(1 for chunk in stream if chunk.choices)
    attacker.join()
    assert statuses == [400] * len(HOSTILE)
    assert chunks > 100, "the stream was not served"
    assert chat(server, guided_choice=["ok"], max_tokens=5).choices[0].message.content == "ok"
    assert server.process.poll() is None
    server.wait_idle(20)


def test_attackers_in_parallel_are_refused_and_a_stranger_is_served(server: ServerProcess) -> None:
    """All attackers share an address. The stranger has another one, and new grammars that are meant well."""
    answers: list[httpx.Response] = []

    def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
        body = {"model": NAME, "prompt": "x", "max_tokens": 9, **fields}
        return client.post(f"{server.url}/v1/completions", json=body)

    def attack(number: int) -> None:
        with httpx.Client(timeout=60) as client:
            for turn in range(3):
                answers.append(ask(client, guided_json={**EXPLOSIVE, "title": f"{number}.{turn}"}))

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(48)]
    for thread in threads:
        thread.start()
    with httpx.Client(timeout=60, transport=httpx.HTTPTransport(local_address="127.0.0.2")) as stranger:
        for number in range(5):
            served = ask(stranger, guided_choice=[f"ok{number}"])
            for _ in range(20):  # on a busy machine even its turn may come too late for the promise
                if served.status_code == 200:
                    break
                time.sleep(float(served.headers["retry-after"]))
                served = ask(stranger, guided_choice=[f"ok{number}"])
            assert served.json()["choices"][0]["text"] == f"ok{number}"
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {400, 429} and len(answers) == 144
    for answer in answers:
        code = "queue_full" if answer.status_code == 429 else "invalid_grammar"
        assert answer.json()["error"]["code"] == code
        assert answer.status_code == 400 or int(answer.headers["retry-after"]) >= 1
    server.wait_idle(20)


def test_a_demanded_call_is_one(server: ServerProcess) -> None:
    parameters = {**SCHEMA, "properties": {**SCHEMA["properties"], "to": {"enum": ["sea", "land"]}}}
    tools = [{"type": "function", "function": {"name": "fly", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "fly"}}
    for choice in ("required", named):
        asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        answer = chat(server, max_tokens=400, seed=2, **asked).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name == "fly"
        jsonschema.validate(json.loads(call.function.arguments), parameters)
    tools[0]["function"]["parameters"] = {"type": "object", "properties": {"to": {"type": "strng"}}}  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="strng"):
        chat(server, tools=tools, tool_choice="required")


def test_beside_tools_a_schema_holds_the_answer_and_no_call(server: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": "fly", "parameters": {"type": "object"}}}]
    (mark,) = httpx.post(f"{server.url}/tokenize", json={"prompt": CALL}, timeout=60).json()["tokens"]
    asked: dict[str, Any] = {"tools": tools, "response_format": FORMAT, "max_tokens": 400, "temperature": 1.0}
    for seed in range(3):
        answer = chat(server, **asked, seed=seed, logit_bias={str(mark): -100}).choices[0]
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        assert not answer.message.tool_calls and answer.finish_reason == "stop"
    called = chat(server, **asked | {"max_tokens": 6}, seed=1, logit_bias={str(mark): 100}).choices[0]
    assert called.message.content == CALL * 6, "the mark is allowed, and after it everything"
    server.wait_idle(20)
