"""Bodies of /tokenize and /detokenize, with the names that vLLM gives their fields.

Not tokenising (server/http/token_routes.py). Units: characters, token ids.
"""

from __future__ import annotations

from typing import Any

from ..errors import invalid
from .field_table import check_inner
from .requests import OpenTurn
from .strict import Body, described

# A text of this length takes about a second; longer ones belong into pieces.
MOST_CHARACTERS = 1 << 20
MOST_TOKENS = 1 << 20


class TokenBody(Body):
    """What the bodies have in common."""

    model: str | None = described("one of the served names; may be left out")

    def check(self) -> None:
        """Refuse unknown fields."""
        check_inner(self.model_extra or {}, type(self).model_fields, "")


class TokenizeText(TokenBody):
    """Body of /tokenize with a text."""

    prompt: str = described("the text", ..., maxLength=MOST_CHARACTERS)
    add_special_tokens: bool | None = described("let the tokenizer add its BOS; default true")
    return_token_strs: bool | None = described("tell the text of each token too; default false")

    def check(self) -> None:
        """Refuse unknown fields and long texts."""
        super().check()
        if len(self.prompt) > MOST_CHARACTERS:
            raise invalid(f"prompt has {len(self.prompt)} characters; send at most {MOST_CHARACTERS}", "prompt")


class TokenizeChat(TokenBody, OpenTurn):
    """Body of /tokenize with messages."""

    add_special_tokens: bool | None = described("let the tokenizer add its BOS too; default false")
    return_token_strs: bool | None = described("tell the text of each token too; default false")

    def check(self) -> None:
        """Refuse unknown fields and turns that do not fit."""
        super().check()
        self.check_turns()


class Detokenize(TokenBody):
    """Body of /detokenize."""

    tokens: list[Any] = described(
        "token ids", ..., most=MOST_TOKENS, items={"type": "integer", "minimum": 0}, maxItems=MOST_TOKENS
    )
