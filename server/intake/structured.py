"""Grammars of requests on their way to an engine: tried before they are queued, and joined with thinking and calls.

Not the reading of fields (server/protocol/structured_fields.py) and not the following of a grammar (text/grammar.py). A
grammar that cannot be used is a 400 before anything is queued; server/grammar_queue.py says when it is tried.
Units: none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...runtime.params import SamplingParams, StructuredSpec
from ...text import Tokenizer
from ...text.grammar import GrammarError
from ...text.grammar_check import GrammarUntried
from ...text.parsers import OutputFormat
from ...text.parsers.table import HARMONY, REASONING_FORMATS
from ..asker import ASKER
from ..errors import invalid, queue_full, unavailable
from ..grammar_queue import ComeLater
from ..state import ServerState

# With gpt-oss the answer is what it writes into the channel `final`.
_HARMONY_FINAL = "<|channel|>final<|message|>"


async def check_structure(state: ServerState, params: SamplingParams, field: str) -> None:
    """Return when the grammar of `params`, if it has one, can be used.

    Args:
        state: of the server.
        params: as they will go to the engine.
        field: where the grammar was sent, for the error.

    Raises:
        ApiError: 400 with what is wrong, 429 where it cannot be tried soon, 503 where nobody can try it.
    """
    spec = params.structured
    if spec is None:
        return
    assert state.tokenizer is not None  # else runtime/checked_params.py has refused it
    if not state.tokenizer.has_pieces:
        raise invalid(f"{field} is not possible with this model's tokenizer; leave it out", field)
    try:
        await state.grammar_queue.check(spec.kind, spec.text, ASKER.get())
    except GrammarError as error:
        raise invalid(f"{field} cannot be used: {error}", field, "invalid_grammar") from None
    except ComeLater as error:
        raise queue_full(str(error), error.retry_after_s) from None
    except GrammarUntried as error:
        raise unavailable(f"{field} could not be tried: {error}; try again later", "grammar_untried") from None


def with_calls(
    params: SamplingParams, formats: OutputFormat, tokenizer: Tokenizer | None, field: str
) -> SamplingParams:
    """Return `params` whose grammar leaves a model free to call tools instead of answering.

    Args:
        params: of a chat with tools, whose answer may be a call.
        formats: of the model.
        tokenizer: of the model.
        field: where the grammar was sent, for the error.

    Raises:
        ApiError: 400, the first token does not tell a call of this model from an answer.
    """
    if params.structured is None or formats.tools == formats.reasoning == HARMONY:
        return params  # with gpt-oss a call stands before the channel of the answer, where nothing is held
    opening = formats.call_opening
    if not opening or tokenizer is None or tokenizer.single_token(opening) is None:
        raise invalid(
            f"{field} and tools exclude each other with this model, whose calls no single token opens: an answer that "
            "keeps to a grammar is no call; leave one of them out, or send tool_choice none or required", "tools",
        )  # fmt: skip
    spec: StructuredSpec = msgspec.structs.replace(params.structured, call_start=opening)
    return msgspec.structs.replace(params, structured=spec)


def with_thinking(params: SamplingParams, formats: OutputFormat, prompt: str) -> SamplingParams:
    """Return `params` whose grammar leaves a model free to think first, where it marks its thinking.

    Args:
        params: of a chat.
        formats: of the model.
        prompt: as the template wrote it; its end tells whether the output begins within the thinking.
    """
    if params.structured is None or formats.reasoning is None:
        return params
    marks = REASONING_FORMATS[formats.reasoning]
    fields: dict[str, Any] = {"thinking_start": marks.start, "thinking_end": marks.end}
    if formats.reasoning == HARMONY:
        fields = {"thinking_end": _HARMONY_FINAL, "thinking": True}
    elif prompt.rstrip().endswith(marks.end):
        return params  # the prompt has closed it
    else:
        fields["thinking"] = marks.opened(prompt)
    spec: StructuredSpec = msgspec.structs.replace(params.structured, **fields)
    return msgspec.structs.replace(params, structured=spec)
