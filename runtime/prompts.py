"""What every door asks of a prompt's token ids before an engine sees them, and what the tokenizer says of a model.

The tokenizer, the chat template in use and the tokens that end a text are found here, once for all doors. Not lengths
(server/intake/token_ids.py, runtime/session.py: each door has its own words for them) and not sampling parameters.
Units: token ids, below the rows of the embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import ChatTemplate, Tokenizer, chosen_template, load_tokenizer
from .config import ModelOptions
from .plan import pack

if TYPE_CHECKING:
    from .resolve import Resolved


def check_token_ids(token_ids: Sequence[Any] | np.ndarray, vocab_size: int, *, name: str = "prompt_token_ids") -> None:
    """Refuse a prompt that holds something else than ids of the model.

    Raises:
        ValueError: names the place, the value and what is allowed; `name` is what the user calls the prompt.
    """
    plain = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    for position, token in enumerate(plain):
        if type(token) is not int:
            raise ValueError(f"{name}.{position} is not a token id (an integer), got {repr(token)[:40]}")
        if not 0 <= token < vocab_size:
            shown = f"={token}" if token.bit_length() < 64 else f" (of {token.bit_length()} bits)"
            raise ValueError(f"{name}.{position}{shown} is no token id of this model; use 0 to {vocab_size - 1}")


def packed(token_ids: Sequence[int]) -> bytes:
    """Return the ids of a prompt that was checked as messages carry them: once for all outputs that continue it."""
    return pack(np.asarray(token_ids))


def tokenizer_folder(model: ModelOptions) -> Path:
    """Return the folder of the tokenizer that server, session and engine all use.

    `revision` names a state of the model alone: its folder is that state already, and another tokenizer has its own.
    """
    other = model.tokenizer if model.tokenizer != model.model else None
    return Path(other or model.path).expanduser()


def model_tokenizer(model: ModelOptions) -> Tokenizer | None:
    """Return what is in `tokenizer_folder`; None with `skip_tokenizer_init`.

    Raises:
        ValueError: there is none that can be read.
    """
    return None if model.skip_tokenizer_init else load_tokenizer(tokenizer_folder(model))


def model_template(model: ModelOptions, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """Return the chat template in use, the one asked for or the model's own; None when there is none.

    The model's own may have a `problem`, which is told at use: completions do not need it.

    Raises:
        ValueError: the one asked for is not there or does not compile.
    """
    if tokenizer is None:
        return None
    if model.chat_template is None:
        return tokenizer.chat_template
    return chosen_template(model.chat_template, tokenizer.templates, tokenizer.special_tokens)


def with_ends(resolved: Resolved, tokenizer: Tokenizer | None, more: Sequence[int] = ()) -> Resolved:
    """Return `resolved` whose model also ends at the tokenizer's end token and at `more`.

    generation_config.json may name several end tokens and the tokenizer another; a text ends at each of them. An id
    without a row in the embedding is never generated and left out.
    """
    own = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    model = resolved.model
    ends = dict.fromkeys((*model.eos_token_ids, *(token for token in (*more, *own) if token < model.vocab_size)))
    return dataclasses.replace(resolved, model=dataclasses.replace(model, eos_token_ids=tuple(ends)))
