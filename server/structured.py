"""Grammars of requests on their way to an engine: tried before they are queued, and joined with a model's thinking.

Not the reading of fields (server/structured_fields.py) and not the following of a grammar (text/grammar.py). A grammar
that cannot be used is a 400 before anything is queued; the work is done in other threads and in a process of its own.
Units: none.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ..runtime.params import SamplingParams, StructuredSpec
from ..text.grammar import GrammarError
from ..text.grammar_check import GrammarUntried
from ..text.parsers import OutputFormat
from ..text.parsers.table import HARMONY, REASONING_FORMATS
from .errors import invalid, queue_full, unavailable
from .state import ServerState

# They only wait: for the helper that tries grammars (text/grammar_check.py).
_THREADS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="moewe-grammar-check")
MOST_WAITING = 64
# With gpt-oss the answer is what it writes into the channel `final`.
_HARMONY_FINAL = "<|channel|>final<|message|>"
_waiting = 0


async def check_structure(state: ServerState, params: SamplingParams, field: str) -> None:
    """Return when the grammar of `params`, if it has one, can be used.

    Args:
        state: of the server.
        params: as they will go to the engine.
        field: where the grammar was sent, for the error.

    Raises:
        ApiError: 400 with what is wrong, 429 where too many grammars wait to be tried, 503 where nobody can try one.
    """
    global _waiting
    spec = params.structured
    if spec is None:
        return
    assert state.tokenizer is not None  # else runtime/checked_params.py has refused it
    if not state.tokenizer.has_pieces:
        raise invalid(f"{field} is not possible with this model's tokenizer; leave it out", field)
    if _waiting >= MOST_WAITING:
        raise queue_full(f"{_waiting} grammars wait to be checked; try again later")
    _waiting += 1
    try:
        await asyncio.get_running_loop().run_in_executor(_THREADS, state.grammar_check.check, spec.kind, spec.text)
    except GrammarError as error:
        raise invalid(f"{field} cannot be used: {error}", field, "invalid_grammar") from None
    except GrammarUntried as error:
        raise unavailable(f"{field} could not be tried: {error}; try again later", "grammar_untried") from None
    finally:
        _waiting -= 1


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
