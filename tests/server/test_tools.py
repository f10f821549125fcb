"""Tools and reasoning over HTTP: what clients send, what models say in their formats, and what clients get."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from moewe.text import Tokenizer
from tests.support.asking import error_of, events, post
from tests.support.fake_replicas import FakeReplicas, make_state, with_server
from tests.support.small_tokenizers import byte_level
from tests.support.tool_templates import ARGUMENTS, TEMPLATES, TOOLS, WITHOUT_REASONING, assistant, output_of

MARK = re.compile(r"<\|\w+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]+\]|</?think>|</?tool_call>")
CHAT = {"model": "gull", "messages": [{"role": "user", "content": "hi"}]}
TWO = [("find_birds", ARGUMENTS), ("now", {})]


def tokenizer_of(text: str) -> Tokenizer:
    """Return a tokenizer to which the marks in `text` are special tokens."""
    backend = byte_level()
    backend.add_special_tokens(sorted(set(MARK.findall(text))))
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def model(name: str, output: str) -> FakeReplicas:
    tokens = tokenizer_of(TEMPLATES[name])
    said = [*tokens.encode(output, add_special_tokens=False), tokens.eos_token_id or 0]
    return FakeReplicas(tokens, lambda _: said, ends=True)


def state_of(name: str, output: str, template: str | None = None, **options: Any) -> Any:
    return make_state(model(name, output), template=template or TEMPLATES[name], max_model_len=4096, **options)


def answer(name: str, output: str, **fields: Any) -> dict[str, Any]:
    response = post(state_of(name, output), "/v1/chat/completions", CHAT | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(name: str, output: str, **fields: Any) -> list[dict[str, Any]]:
    response = post(state_of(name, output), "/v1/chat/completions", CHAT | fields | {"stream": True})
    *chunks, done = events(response)
    assert done == "DONE"
    return chunks


def deltas_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


# --- answers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TEMPLATES)
def test_openai_client_gets_calls_and_reasoning_in_both_modes(name: str) -> None:
    reasoning = None if name in WITHOUT_REASONING else "Birds, hm."
    output = output_of(TEMPLATES[name], assistant(TWO, "Well, möwe.", reasoning)).removesuffix("<|call|>")
    asked: Any = {"model": "gull", "messages": CHAT["messages"], "tools": TOOLS}

    async def run(http: httpx.AsyncClient) -> tuple[Any, Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http) as client:
            whole = await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(**asked) as stream:
                chunks = [event.chunk async for event in stream if event.type == "chunk"]
                return whole, await stream.get_final_completion(), chunks

    whole, added_up, chunks = with_server(state_of(name, output), run)
    for choice in (whole.choices[0], added_up.choices[0]):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Well, möwe."
        calls = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == TWO
        assert len({call.id for call in calls}) == 2 and {call.type for call in calls} == {"function"}
        pattern = r"[0-9A-Za-z]{9}" if name.startswith("mistral") else r"call_[0-9a-f]{24}"
        assert all(re.fullmatch(pattern, call.id) for call in calls)
    assert getattr(whole.choices[0].message, "reasoning_content", None) == reasoning
    assert getattr(whole.choices[0].message, "reasoning", None) == reasoning
    found = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(found) == (reasoning or "")
    firsts: dict[int, Any] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index in firsts:
                assert call.id is None and call.function.name is None and call.function.arguments
            else:
                assert call.id and call.function.name and call.function.arguments == ""
                firsts[call.index] = call
    assert list(firsts) == [0, 1]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


def test_content_is_null_where_there_are_only_calls() -> None:
    output = output_of(TEMPLATES["hermes"], assistant(TWO[1:]))
    message = answer("hermes", output, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None and "reasoning" not in message
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_answers_without_calls_are_text_and_stop() -> None:
    choice = answer("hermes", "Just a <b>text</b>\n", tools=TOOLS)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Just a <b>text</b>\n", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_one_call_where_no_parallel_ones_are_wanted() -> None:
    output = output_of(TEMPLATES["hermes"], assistant(TWO))
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = answer("hermes", output, **fields)["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["find_birds"]
    assert choice["finish_reason"] == "tool_calls"
    calls = [call for delta in deltas_of(streamed("hermes", output, **fields)) for call in delta.get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}


def test_a_call_cut_off_is_shown_as_far_as_it_goes_and_promises_nothing() -> None:
    output = '<tool_call>\n{"name": "now", "arguments": {"a": "bcd'
    for fields, reason in (({}, "stop"), ({"max_tokens": 30}, "length")):
        choice = answer("hermes", output, tools=TOOLS, **fields)["choices"][0]
        assert choice["finish_reason"] == reason
        assert '{"a": "bcd'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
    choice = answer("hermes", output[:25], tools=TOOLS)["choices"][0]
    assert choice["message"]["content"] == output[:25] and "tool_calls" not in choice["message"]


def test_thinking_that_the_prompt_opened_is_reasoning_and_counted() -> None:
    template = "{{ messages[0].content }}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    output = "Hm hm.\n</think>\n\nYes."
    for thinks in (True, False):
        state = state_of("hermes", output, template=template)
        body = post(state, "/v1/chat/completions", CHAT | {"chat_template_kwargs": {"enable_thinking": thinks}}).json()
        message, details = body["choices"][0]["message"], body["usage"]["completion_tokens_details"]
        if thinks:
            assert (message["reasoning_content"], message["content"]) == ("Hm hm.", "Yes.")
            assert 0 < details["reasoning_tokens"] < body["usage"]["completion_tokens"]
        else:
            assert message["content"] == output and "reasoning_content" not in message
            assert details["reasoning_tokens"] == 0


def test_log_probabilities_cover_every_token_of_calls_and_reasoning() -> None:
    output = output_of(TEMPLATES["hermes"], assistant(TWO, "Well.", "Hm."))
    fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    body = answer("hermes", output, **fields)
    whole = body["choices"][0]["logprobs"]["content"]
    assert len(whole) == body["usage"]["completion_tokens"]
    chunks = streamed("hermes", output, **fields)
    pieces = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert pieces == whole


def test_formats_can_be_named_and_switched_off() -> None:
    output = output_of(TEMPLATES["hermes"], assistant(TWO[1:], "", "Hm."))
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    state = state_of("hermes", output, template=plain, tool_call_parser="qwen25", reasoning_parser="glm45")
    message = post(state, "/v1/chat/completions", CHAT | {"tools": TOOLS}).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm." and message["tool_calls"][0]["function"]["name"] == "now"
    state = state_of("hermes", "</think><tool_call>", tool_call_parser="none", reasoning_parser="none")
    body = post(state, "/v1/chat/completions", CHAT).json()
    assert body["choices"][0]["message"]["content"] == "" and "completion_tokens_details" not in body["usage"]
    response = post(state, "/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert response.status_code == 400 and "--tool-call-parser" in error_of(response)["message"]


# --- prompts ----------------------------------------------------------------------------------------------------------
def prompt_of(name: str, **fields: Any) -> str:
    replicas = model(name, "ok")
    response = post(
        make_state(replicas, template=TEMPLATES[name], max_model_len=4096), "/v1/chat/completions", CHAT | fields
    )
    assert response.status_code == 200, response.text
    ((prompt, *_),) = replicas.submitted.values()
    assert replicas.tokenizer is not None
    return replicas.tokenizer.decode(prompt, skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_history_of_calls_reaches_every_template(name: str) -> None:
    turn = assistant(TWO) | {"content": None, "refusal": None, "function_call": None}
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"result {i}"} for i in range(2)]
    prompt = prompt_of(name, messages=[*CHAT["messages"], turn, *results, {"role": "user", "content": "and?"}])
    assert output_of(TEMPLATES[name], assistant(TWO)) in prompt and "None" not in prompt.replace("null", "")
    assert prompt.index("result 0") < prompt.index("result 1") < prompt.index("and?")


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    assert "find_birds" in prompt_of("hermes", tools=TOOLS)
    assert "find_birds" not in prompt_of("hermes", tools=TOOLS, tool_choice="none")
    output = output_of(TEMPLATES["hermes"], assistant(TWO[1:]))
    message = answer("qwen3_coder", output, tools=TOOLS, tool_choice="none")["choices"][0]["message"]
    assert "tool_calls" not in message


def test_reasoning_of_earlier_turns_reaches_the_template() -> None:
    for field in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "Yes.", field: "Hm."}
        prompt = prompt_of("hermes", messages=[*CHAT["messages"], turn, {"role": "user", "content": "so?"}])
        assert "<think>\nHm.\n</think>\n\nYes." in prompt


# --- demands ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("choice", "output", "calls"),
    [
        ("required", '[{"name": "now", "parameters": {}}, {"name": "find_birds", "parameters": {"most": 1}}]',
         [("now", {}), ("find_birds", {"most": 1})]),
        ({"type": "function", "function": {"name": "find_birds"}}, '{"most": 1}', [("find_birds", {"most": 1})]),
    ],
)  # fmt: skip
def test_a_demanded_call_is_forced_by_a_schema_and_read(choice: Any, output: str, calls: list[Any]) -> None:
    replicas = model("hermes", output)
    state = make_state(replicas, template=TEMPLATES["hermes"], max_model_len=4096)
    body = post(state, "/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": choice}).json()
    found = body["choices"][0]["message"]["tool_calls"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    ((_, params, _),) = replicas.submitted.values()
    assert params.structured is not None and params.structured.kind == "json"
    schema = json.loads(params.structured.text)
    assert ("items" in schema) == (choice == "required")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": "all"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 'tools.0.function.name="a b"'),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
         'tools.0.function.parameters.type="string"'),
        ({"tools": TOOLS[:1] * 1025}, "tools has more than 1024 entries; send fewer"),
        ({"tools": TOOLS, "tool_choice": "always"}, 'tool_choice="always"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "names no function"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice=5"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
         "messages.0.tool_calls.0.function.arguments is not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]},
         "not an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 99999}}]}]},
         "is not JSON"),
    ],
)  # fmt: skip
def test_mistakes_with_tools_are_named(fields: dict[str, Any], named: str) -> None:
    response = post(state_of("hermes", "x"), "/v1/chat/completions", CHAT | fields)
    assert response.status_code == 400, response.text
    assert named in error_of(response)["message"]


@pytest.mark.parametrize("field", ["tools", "tool_choice", "parallel_tool_calls"])
def test_completions_know_no_tools(field: str) -> None:
    body = {"model": "gull", "prompt": "a", field: []}
    response = post(state_of("hermes", "x"), "/v1/completions", body)
    assert response.status_code == 400 and "/v1/chat/completions" in error_of(response)["message"]
