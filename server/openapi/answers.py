"""What answers look like, as JSON schemas for the OpenAPI document: what clients may count on.

Not the answers (server/answers/answer.py). Further fields may come; those listed as required always do.
Units: as OpenAI's API.
"""

from __future__ import annotations

from typing import Any

from ...topologies.advisor.records import VERDICTS
from ...topologies.advisor.turns import BESIDE, IN_TURNS, WAYS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}
_NULLABLE_OBJECT: Schema = {"type": ["object", "null"]}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_REASON: Schema = {"enum": ["stop", "length", "tool_calls", "abort"]}


def ref(name: str) -> Schema:
    """Return the reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties}


def _many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_HEAD = {"id": _TEXT, "created": _INTEGER, "model": _TEXT}
_MODEL = {"id": _TEXT, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _TEXT}

ANSWERS: dict[str, Schema] = {
    "Error": _object({
        "error": _object({"message": _TEXT, "type": _TEXT, "param": _NULLABLE_TEXT, "code": _NULLABLE_TEXT}),
    }),
    "Usage": _object(
        {"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER},
        {"completion_tokens_details": _object({"reasoning_tokens": _INTEGER})},
    ),
    "Completion": _object({
        **_HEAD, "object": {"const": "text_completion"}, "usage": ref("Usage"),
        "choices": _many(ref("CompletionChoice")),
    }),
    "CompletionChoice": _object(
        {"index": _INTEGER, "text": _TEXT, "logprobs": _NULLABLE_OBJECT, "finish_reason": _REASON},
        {"prompt_logprobs": _many(_NULLABLE_OBJECT), "prompt_token_ids": _IDS, "token_ids": _IDS},
    ),
    "ChatCompletion": _object(
        {**_HEAD, "object": {"const": "chat.completion"}, "usage": ref("Usage"), "choices": _many(ref("ChatChoice"))},
        {"prompt_logprobs": _many(_NULLABLE_OBJECT), "prompt_token_ids": _IDS},
    ),
    "ChatChoice": _object(
        {"index": _INTEGER, "message": ref("AnswerMessage"), "logprobs": _NULLABLE_OBJECT, "finish_reason": _REASON},
        {"token_ids": _IDS},
    ),
    "AnswerMessage": _object(
        {"role": {"const": "assistant"}, "content": _NULLABLE_TEXT, "refusal": {"type": "null"}},
        {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _many({"type": "object"})},
    ),
    "Event": {
        **_object({"data": _TEXT}),
        "description": "One event of a stream; `data` is a chunk as JSON, or an error, and `[DONE]` in the last",
    },
    "Model": _object(_MODEL, {"root": _TEXT, "max_model_len": _INTEGER}),
    "ModelList": _object({"object": {"const": "list"}, "data": _many(ref("Model"))}),
    "Tokens": _object({
        "count": _INTEGER, "max_model_len": _INTEGER, "tokens": _IDS, "token_strs": {"type": ["array", "null"]},
    }),
    "Text": _object({"prompt": _TEXT}),
    "Status": _object({"status": _TEXT}, {"reason": _TEXT}),
    "Version": _object({"version": _TEXT}),
    "Topology": _object({
        "topology": _TEXT, "ep": _INTEGER, "dp": _INTEGER, "num_ranks": _INTEGER, "replicas": _many({"type": "object"}),
    }),
    "Advice": _object({
        "number": _INTEGER, "time": _NUMBER, "topology": _TEXT, "verdict": {"enum": list(VERDICTS)}, "advised": _TEXT,
        "gain": _NUMBER, "reason": _TEXT, "candidates": _many(ref("AdvisedLayout")), "calibration": _NULLABLE_OBJECT,
        "excluded": _many({"type": "array", "items": _TEXT}), "interval_seconds": _NUMBER,
    }),
    "AdvisedLayout": _object({
        "topology": _TEXT, "step_s": _NUMBER, "gain": _NUMBER, "exchange_share": _NUMBER, "between_share": _NUMBER,
        "routed_ratio": _NUMBER, "products_s": _NUMBER, "restart_s": _NUMBER, "load_bytes": _INTEGER,
        "sequences": _INTEGER, "is_measured": {"type": "boolean"}, "way": {"enum": ["", *WAYS]}, "change_s": _NUMBER,
        "lost_s": _NUMBER,
    }),
    "LayoutChange": _object({
        "before": _TEXT, "after": _TEXT, "way": {"enum": [BESIDE, IN_TURNS]}, "turns": _INTEGER, "turn": _INTEGER,
        "state": {"enum": ["running", "done", "failed"]}, "reason": _TEXT, "seconds": _NUMBER,
    }),
    "LayoutProgress": _object({"change": {"anyOf": [ref("LayoutChange"), {"type": "null"}]}}),
    "StepTrace": {
        **_object({"traceEvents": _many({"type": "object"}), "otherData": {"type": "object"}}),
        "description": "In Chrome's Trace Event Format, for ui.perfetto.dev and chrome://tracing",
    },
    "TraceProgress": _object({"recording": {"type": "boolean"}}, {"steps": _INTEGER, "recorded": _many(_INTEGER)}),
}  # fmt: skip

STATUSES = {
    "400": "something in the request must change; the message names the field, the value and the fix",
    "401": "no key or a wrong one",
    "403": "the server was not started so that it may be done",
    "404": "no such model, no such path",
    "409": "another one is under way: a trace, a change of the layout; come again when it is done",
    "408": "the body came too slowly",
    "413": "the body is larger than the server reads (`--max-body-bytes`)",
    "429": "every place to run and to wait is taken; come again after `Retry-After`",
    "500": "the engine failed on this request",
    "503": "loading, shutting down or lost; come again after `Retry-After`, here or elsewhere",
}
