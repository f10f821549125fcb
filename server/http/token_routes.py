"""/tokenize and /detokenize: what the model's tokenizer makes of a text or a chat, and back; in vLLM's shapes.

Not generation: the context's length is told, not enforced. Units: token ids, characters.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ...text import Tokenizer
from ..errors import invalid
from ..intake.chat_prompt import render, template_of, template_options
from ..intake.token_ids import checked_token_ids, in_thread
from ..protocol.strict import parse
from ..protocol.token_bodies import Detokenize, TokenizeChat, TokenizeText
from ..protocol.tool_fields import checked_tools
from ..state import ServerState
from .bodies import read_body


def add_token_routes(app: FastAPI, state: ServerState) -> None:
    """Add the routes."""

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        data = await read_body(state, http)
        request: TokenizeChat | TokenizeText
        named = _named(data)
        if named is not None and ("messages" in named) == ("prompt" in named):
            said = "prompt and messages exclude each other" if "prompt" in named else "prompt and messages are missing"
            raise invalid(f"{said}; send one of them", "prompt")
        request = parse(TokenizeChat, data) if named and "messages" in named else parse(TokenizeText, data)
        if request.model is not None:
            state.require_model(request.model)
        if isinstance(request, TokenizeText):
            text, special = request.prompt, request.add_special_tokens is not False
        else:
            chat = request
            text, special = await in_thread(lambda: _chat_text(state, chat)), bool(chat.add_special_tokens)
        return JSONResponse(await in_thread(lambda: _tokens(state, text, special, bool(request.return_token_strs))))

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = parse(Detokenize, await read_body(state, http))
        if request.model is not None:
            state.require_model(request.model)
        tokenizer = _tokenizer(state)

        def work() -> str:
            tokens = checked_token_ids(request.tokens, state, "tokens", "tokens")
            return tokenizer.decode(tokens, skip_special_tokens=False)

        return JSONResponse({"prompt": await in_thread(work)})


def _named(data: bytes) -> set[str] | None:
    """Return the names in a body, None when it is no object; what is wrong then is told by the parser of the body."""
    try:
        return set(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _chat_text(state: ServerState, request: TokenizeChat) -> str:
    template = template_of(state)
    options = template_options(template, request.chat_template_kwargs, None)
    messages = [message.check(position) for position, message in enumerate(request.messages)]
    return render(template, messages, request, options, checked_tools(request.tools))


def _tokens(state: ServerState, text: str, special: bool, strings: bool) -> dict[str, Any]:
    tokenizer = _tokenizer(state)
    try:
        ids = tokenizer.encode(text, special)
    except ValueError as error:
        raise invalid(str(error), "prompt") from None
    return {
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(token_id) for token_id in ids] if strings else None,
    }


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.tokenizer is None:
        raise invalid("the server runs without a tokenizer (--skip-tokenizer-init); there is nothing to ask")
    return state.tokenizer
