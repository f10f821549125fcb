"""What every door asks of a prompt's token ids before an engine sees them, and the tokenizer that made them.

Not lengths (server/intake.py, runtime/session.py: each door has its own words for them) and not sampling parameters.
Units: token ids, below the rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..text import Tokenizer, load_tokenizer
from .config import ModelOptions


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
            raise ValueError(f"{name}.{position}={token} is no token id of this model; use 0 to {vocab_size - 1}")


def model_tokenizer(model: ModelOptions) -> Tokenizer | None:
    """Return the tokenizer that server, session and engine all use; None with `skip_tokenizer_init`.

    `revision` names a state of the model alone: its folder is that state already, and another tokenizer has its own.

    Raises:
        ValueError: there is none that can be read.
    """
    if model.skip_tokenizer_init:
        return None
    other = model.tokenizer if model.tokenizer != model.model else None
    return load_tokenizer(Path(other or model.path).expanduser())
