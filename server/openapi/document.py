"""The OpenAPI document: every route, every field that is honoured with type and limits, and what is taken or refused.

Not a page (server/http/docs_page.py) and not the checks: the document is made from the same tables as they are.
Units: as OpenAI's API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..intake.chat_prompt import EFFORT, reads
from ..intake.token_ids import MOST_PROMPTS
from ..options import VERSION
from ..protocol.field_table import CHAT_ONLY, COMPLETIONS_ONLY, IGNORED, UNSUPPORTED
from ..protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from ..protocol.token_bodies import Detokenize, TokenizeChat, TokenizeText
from ..trace.limits import DEFAULT_IDLE_SECONDS, DEFAULT_STEPS, LEAST_IDLE_SECONDS, MOST_IDLE_SECONDS, MOST_STEPS
from .answers import ANSWERS, STATUSES, Schema, ref
from .rules import add_rules

if TYPE_CHECKING:
    from ..state import ServerState

GENERATING_BODIES = ("CompletionRequest", "ChatRequest")
GENERATING = {"400", "401", "404", "408", "413", "429", "500", "503"}
_BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeText, TokenizeChat, Detokenize)


def document(state: ServerState | None = None) -> Schema:
    """Return the document: of a server, with its names and limits, or in general."""
    schemas = {**ANSWERS, **_body_schemas(state)}
    paths = _paths()
    secured = state is not None and bool(state.options.api_keys)
    for operation in (operation for item in paths.values() for operation in item.values()):
        if secured:
            operation["security"] = [{"bearer": []}] if "401" in operation["responses"] else []
        else:
            operation["responses"].pop("401", None)
    components: Schema = {"schemas": schemas}
    if secured:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "moewe", "version": VERSION, "description": "OpenAI's routes, and a few of ours."},
        "paths": paths,
        "components": components,
    }


def refused_on(chat: bool) -> dict[str, tuple[Any, ...]]:
    """Return the fields that one of the two routes refuses, with the values that ask for nothing."""
    foreign = COMPLETIONS_ONLY if chat else CHAT_ONLY
    return {name: values for name, values in sorted(UNSUPPORTED.items()) if name not in foreign}


def _body_schemas(state: ServerState | None) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for body in _BODIES:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        found |= schema.pop("$defs", {})
        if issubclass(body, GenerationRequest):
            schema["properties"] |= _without_effect(issubclass(body, ChatRequest))
            schema["required"] = sorted({*schema.get("required", ()), "model"})
            schema["properties"]["model"] = {"type": "string", "description": "one of the served names"}
        found[body.__name__] = schema
    for schema in found.values():
        schema["additionalProperties"] = False
        schema["description"] = schema.get("description", "").partition(".")[0]
        for one in (schema, *schema["properties"].values()):
            one.pop("title", None)
            one.pop("default", None)
    _bounded(found)
    add_rules(found)
    if state is not None:
        _bounded_here(found, state)
    return found


def _without_effect(chat: bool) -> dict[str, Schema]:
    taken: dict[str, Schema] = {name: {"description": "taken without effect"} for name in sorted(IGNORED)}
    refused: dict[str, Schema] = {
        name: {"description": "not supported: only values that ask for nothing", "enum": list(values)}
        for name, values in refused_on(chat).items()
    }
    return taken | refused


def _bounded(schemas: dict[str, Schema]) -> None:
    """Write in what types of Python cannot say."""
    token: Schema = {"type": "integer", "minimum": 0}
    ids: Schema = {"type": "array", "items": token, "minItems": 1}
    text: Schema = {"type": "string"}
    each: Schema = {"anyOf": [{"type": "string"}, ids]}
    several: Schema = {"type": "array", "items": each, "minItems": 1, "maxItems": MOST_PROMPTS}
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]
    prompt.pop("type", None)
    prompt["anyOf"] = [text, ids, several]
    schemas["CompletionRequest"]["required"] = ["model", "prompt"]
    schemas["ChatRequest"]["properties"]["max_tokens"]["minimum"] = 1
    schemas["Detokenize"]["properties"]["tokens"]["items"] = token
    for name in GENERATING_BODIES:
        properties = schemas[name]["properties"]
        properties["stop_token_ids"]["items"] = token
        properties["logit_bias"] |= {
            "propertyNames": {"pattern": "^[0-9]{1,11}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }


def _bounded_here(schemas: dict[str, Schema], state: ServerState) -> None:
    """Write in what only the model or the server's options tell."""
    most_tokens, vocabulary = state.max_model_len, state.model_config.vocab_size
    for schema in schemas.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"]["enum"] = [*state.names]
    ids = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][1]
    stops = [schemas[name]["properties"]["stop_token_ids"] for name in GENERATING_BODIES]
    for tokens in (ids, schemas["Detokenize"]["properties"]["tokens"], *stops):
        tokens["items"]["maximum"] = vocabulary - 1
    ids["maxItems"] = most_tokens
    if state.tokenizer is not None and not state.tokenizer.encode("", add_special_tokens=True):
        text, _, several = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
        for one in (text, several["items"]["anyOf"][0]):
            one["minLength"] = 1  # no BOS is put in front, so it would hold no token
    for name in GENERATING_BODIES:
        properties = schemas[name]["properties"]
        properties["logit_bias"]["propertyNames"] = {"pattern": f"^[0-9]{{1,{len(str(vocabulary - 1))}}}$"}
        properties["n"]["maximum"] = min(state.options.max_n, state.hub.most_live)
        for field in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if field in properties:
                properties[field]["maximum"] = most_tokens - 1
        if state.config.schedule.policy != "priority":
            properties["priority"] |= {"minimum": 0, "maximum": 0}
    if state.template is None or not reads(state.template, EFFORT):
        schemas["ChatRequest"]["properties"][EFFORT]["enum"] = [None]


def _paths() -> dict[str, dict[str, Schema]]:
    stream: Schema = {"text/event-stream": {"schema": ref("Event")}}
    name: Schema = {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "one of the served names",
        "schema": {"type": "string"},
    }
    form = _query("format", "`text` draws the map", {"enum": ["json", "text"], "default": "json"})
    steps = _query(
        "steps",
        "so many steps of each replica, the next ones",
        {
            "type": "integer",
            "minimum": 1,
            "maximum": MOST_STEPS,
            "default": DEFAULT_STEPS,
        },
    )
    idle = _query(
        "idle_timeout",
        "seconds without a step after which a trace ends with what there is",
        {
            "type": "number",
            "minimum": LEAST_IDLE_SECONDS,
            "maximum": MOST_IDLE_SECONDS,
            "default": DEFAULT_IDLE_SECONDS,
        },
    )
    layout = _query("topology", "EPxDPy, by default the advised one", {"type": "string"})
    plain: Schema = {"text/plain": {"schema": {"type": "string"}}}
    topology = _get("The live map of ranks and experts", "Topology", {"400", "401"}, plain)
    tokenize = {"anyOf": [ref("TokenizeText"), ref("TokenizeChat")]}
    few = {"401", "503"}
    texts = GENERATING - {"429", "500"}
    return {
        "/v1/completions": {
            "post": _post("Continue prompts", ref("CompletionRequest"), "Completion", GENERATING, stream)
        },
        "/v1/chat/completions": {
            "post": _post("Answer a chat", ref("ChatRequest"), "ChatCompletion", GENERATING, stream)
        },
        "/v1/models": {"get": _get("The served names", "ModelList", few)},
        "/v1/models/{model}": {"get": {**_get("One served name", "Model", {*few, "404"}), "parameters": [name]}},
        "/tokenize": {"post": _post("Token ids of a text or a chat", tokenize, "Tokens", texts)},
        "/detokenize": {"post": _post("Text of token ids", ref("Detokenize"), "Text", texts)},
        "/v1/topology": {"get": {**topology, "parameters": [form]}},
        "/v1/topology/advice": {"get": _get("What the advisor says of the layout", "Advice", {"401"})},
        "/v1/topology/apply": {
            "post": {**_accepted(_get("Change the layout while serving", "LayoutChange",
                                      {*few, "400", "403", "409"})), "parameters": [layout]},
            "get": _get("How far a change of the layout is", "LayoutProgress", {"401"}),
        },
        "/v1/trace": {
            "post": {**_get("Where the time of the next steps goes", "StepTrace", {*few, "400", "409"}),
                     "parameters": [steps, idle]},
            "get": _get("How far a trace is", "TraceProgress", {"401"}),
        },
        "/health": {"get": _get("200 while the process can serve or will", "Status", set(), unready="Status")},
        "/ready": {"get": _get("200 while requests are taken", "Status", set(), unready="Status")},
        "/metrics": {"get": _get("Figures for Prometheus", None, {"401"}, plain)},
        "/version": {"get": _get("The version", "Version", {"401"})},
    }  # fmt: skip


def _accepted(operation: Schema) -> Schema:
    """Return an operation that answers before it is done."""
    responses = operation["responses"]
    responses["202"] = responses.pop("200")
    return operation


def _query(name: str, words: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "description": words, "schema": schema}


def _post(summary: str, body: Schema, answer: str, statuses: set[str], more: Schema | None = None) -> Schema:
    content = {"application/json": {"schema": body}}
    return {**_get(summary, answer, statuses, more), "requestBody": {"required": True, "content": content}}


def _get(
    summary: str, answer: str | None, statuses: set[str], more: Schema | None = None, unready: str | None = None
) -> Schema:
    """Return one operation; with `unready` its 503 has that body rather than an error's."""
    content = {**({"application/json": {"schema": ref(answer)}} if answer else {}), **(more or {})}
    responses: Schema = {"200": {"description": summary, "content": content}}
    for status in sorted(statuses):
        error = {"application/json": {"schema": ref("Error")}}
        responses[status] = {"description": STATUSES[status], "content": error}
    if unready is not None:
        responses["503"] = {"description": "not now", "content": {"application/json": {"schema": ref(unready)}}}
    return {"summary": summary, "responses": responses}
