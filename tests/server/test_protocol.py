"""The document of the API names every field that the code treats specially."""

from __future__ import annotations

from pathlib import Path

from moewe.server.protocol import IGNORED, UNSUPPORTED, ChatRequest, CompletionRequest


def test_document_names_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    honoured = {*CompletionRequest.model_fields, *ChatRequest.model_fields} - {"prompt"}
    missing = [name for name in sorted(honoured | set(IGNORED) | set(UNSUPPORTED)) if f"`{name}`" not in text]
    assert not missing


def test_no_field_is_in_two_lists() -> None:
    honoured = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert not (honoured & set(UNSUPPORTED) or honoured & IGNORED or IGNORED & set(UNSUPPORTED))
