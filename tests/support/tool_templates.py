"""Chat templates that write turns with thinking and calls in the formats that the families document.

Not any model's template: each is as short as its format allows. A rendered turn, less the prompt before it, is what a
model of the family would say. `TURNS` is the conversation that all of them write.
Units: characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moewe.text import ChatTemplate

_OPEN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
_CLOSE = "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


def _written(turn: str) -> str:
    return f"{_TOOLS}{_OPEN}{turn}{_CLOSE}{_PROMPT}"


_CALL = "{% for c in m.tool_calls %}{% set f = c.function %}"
_DEEP = (
    "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + _CALL + "<｜tool▁call▁begin｜>%s<｜tool▁call▁end｜>"
    "{% if not loop.last %}\n{% endif %}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
)
_TO = "<|start|>assistant<|channel|>"
_ARG = "{% for k, v in f.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"

TEMPLATES: dict[str, str] = {
    "hermes": _written(
        _THINK + "{{ m.content }}" + _CALL + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}"
    ),
    "qwen3_coder": _written(
        _THINK + "{{ m.content }}" + _CALL + "\n<tool_call>\n<function={{ f.name }}>\n" + _ARG
        + "<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    "glm45": _written(
        _THINK + "{{ m.content }}" + _CALL + "\n<tool_call>{{ f.name }}\n" + _ARG + "<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>" + _VALUE + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    ),
    "minimax_m2": _written(
        _THINK + "{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n" + _CALL
        + '<invoke name="{{ f.name }}">\n' + _ARG + '<parameter name="{{ k }}">' + _VALUE
        + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
    ),
    "deepseek_v3": _written(
        # Arguments are joined to text here, as in DeepSeek's own: they must be able to be text as well.
        _THINK + _DEEP.replace("%s", "function<｜tool▁sep｜>{{ f.name }}\n{{ '```json\n' + f.arguments + '\n```' }}")
    ),
    "deepseek_v31": _written(_THINK + _DEEP.replace("%s", "{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}")),
    "kimi_k2": _written(
        _THINK + "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>" + _CALL
        + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    ),
    "gpt_oss": (
        _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
        + _TO + "analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}{% if m.content or not m.tool_calls %}"
        + _TO + "{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}<|end|>{% endif %}" + _CALL
        + _TO + "commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>"
        "{% endfor %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "mistral": _written(
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}[TOOL_CALLS] [" + _CALL + '{"name": "{{ f.name }}", '
        '"arguments": {{ f.arguments | tojson }}, "id": "abcdef12{{ loop.index0 }}"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    ),
    "mistral_named": _written(
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
        + _CALL + "[TOOL_CALLS]{{ f.name }}{% if loop.first %}[CALL_ID]abcdef123{% endif %}[ARGS]"
        "{{ f.arguments | tojson }}{% endfor %}"
    ),
    "llama3_json": _written(
        "{{ m.content }}{% if m.tool_calls %}<|python_tag|>" + _CALL + '{"name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}{% if not loop.last %}; {% endif %}{% endfor %}{% endif %}"
    ),
    "llama4_pythonic": _written(
        "{{ m.content }}{% if m.tool_calls %}<|python_start|>[" + _CALL + "{{ f.name }}(" + _ARG
        + "{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|python_end|>"
        "{% endif %}"
    ),
    "hunyuan": _written(
        _THINK + "{{ m.content }}{% if m.tool_calls %}<tool_calls>[" + _CALL + '{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]</tool_calls>{% endif %}"
    ),
    "granite": _written(
        "{{ m.content }}{% if m.tool_calls %}<|tool_call|>[" + _CALL + '{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    ),
}  # fmt: skip

WITHOUT_REASONING = {"llama3_json", "llama4_pythonic", "granite"}

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "find_birds", "description": "Finds birds.",
        "parameters": {"type": "object", "properties": {
            "where": {"type": "string"}, "most": {"type": "integer"}, "wild": {"type": "boolean"},
            "near": {"type": "object"}, "names": {"type": "array"}, "note": {"type": ["string", "null"]}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "where": 'a "quoted" } place\nwith two lines, möwe \U0001f426 \\n',
    "most": 5,
    "wild": True,
    "near": {"a": {"b": [1, {"c": "}{"}]}, "e": []},
    "names": ["gull", "5", 2.5],
    "note": None,
}


def assistant(
    calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = "", reasoning: str | None = None
) -> dict[str, Any]:
    """Return a turn as a client sends it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def output_of(template: str, turn: Mapping[str, Any]) -> str:
    """Return what a model says so that a template writes it as `turn`, whose arguments a template can read."""
    chat = ChatTemplate(template)
    before = [{"role": "user", "content": "hi"}]
    prompt = chat.render(before, add_generation_prompt=True)
    whole = chat.render([*before, turn], add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole[len(prompt) :]
