"""Calibration and held-out text for the carving: conversations written for it, and Python's own documentation.

Not used by a user's build. Each sequence is a row of token ids [1, S] i64, S <= 512, of the demo's own tokenizer.
The documentation depends on the Python version; docs/demo.md names the one that `carving.npz` was made with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch import Tensor

from .dense_source import DenseSource
from .model_files import tokenizer_json

CONVERSATIONS_FILE = Path(__file__).with_name("conversations.json")
SEQUENCE_TOKENS = 512
CALIBRATION_PAGES = 24
HELD_OUT_PAGES = 12


class TextSets:
    """Calibration and held-out token rows; no page of documentation and no conversation is in both."""

    def __init__(self, source: DenseSource) -> None:
        self._tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(source)))
        self._template = ImmutableSandboxedEnvironment().from_string(source.field("tokenizer.chat_template"))

    def conversations(self, part: str) -> list[Tensor]:
        """Question and answer under the chat template; `part` is `calibration` or `held_out`."""
        rows = json.loads(CONVERSATIONS_FILE.read_text(encoding="utf-8"))[part]
        return [self._row(self._chat(row["question"], row["answer"])) for row in rows]

    def documentation(self, part: str) -> list[Tensor]:
        """Pages of Python's documentation; in `calibration` every second one is an answer under the chat template."""
        held_out = part == "held_out"
        return list(self._pages(held_out))[: HELD_OUT_PAGES if held_out else CALIBRATION_PAGES]

    def _pages(self, held_out: bool) -> Iterator[Tensor]:
        for index, (name, text) in enumerate(sorted(topics.topics.items())):
            if (index % 3 == 0) != held_out or len(text) < 3 * SEQUENCE_TOKENS:
                continue
            as_answer = not held_out and index % 2 == 1
            yield self._row(
                self._chat(f"What does Python's documentation say about {name}?", text) if as_answer else text
            )

    def _chat(self, question: str, answer: str) -> str:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self._template.render(messages=turns, add_generation_prompt=False)

    def _row(self, text: str) -> Tensor:
        return torch.tensor([self._tokenizer.encode(text).ids[:SEQUENCE_TOKENS]])
