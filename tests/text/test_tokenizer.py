"""Tokenizer: what is added around a text, special tokens, and mistakes in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from moewe.text import load_tokenizer
from tests.support.small_tokenizers import byte_level, write


def with_processor(folder: Path) -> Path:
    write(folder, "byte_level")
    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("how", ["config", "processor", "both"])
def test_bos_is_added_exactly_once(tmp_path: Path, how: str) -> None:
    if how == "config":
        write(tmp_path, "byte_level", add_bos_token=True)
    else:
        with_processor(tmp_path)
    if how == "both":
        write_config(tmp_path, add_bos_token=True)
    tokens = load_tokenizer(tmp_path)
    plain = tokens.encode("the sea", add_special_tokens=False)
    assert tokens.encode("the sea") == [tokens.bos_token_id, *plain]
    assert tokens.encode("<s>the sea") == [tokens.bos_token_id, *plain]
    assert tokens.encode("<s>the sea", add_special_tokens=False) == [tokens.bos_token_id, *plain]


def test_config_can_switch_bos_off(tmp_path: Path) -> None:
    with_processor(tmp_path)
    write_config(tmp_path, add_bos_token=False)
    tokens = load_tokenizer(tmp_path)
    assert tokens.bos_token_id not in tokens.encode("the sea")


def write_config(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_tokens_known_only_to_the_config_get_their_id(tmp_path: Path) -> None:
    size = load_tokenizer(write(tmp_path, "byte_level")).vocab_size
    write_config(tmp_path, added_tokens_decoder={str(size): {"content": "<|end|>", "special": True}})
    tokens = load_tokenizer(tmp_path)
    assert tokens.encode("a<|end|>")[-1] == size
    assert size in tokens.special_ids
    assert tokens.token_text(size) == "<|end|>"
    assert tokens.vocab_size == size + 1


def test_token_text_and_bytes(tmp_path: Path) -> None:
    tokens = load_tokenizer(write(tmp_path, "byte_level"))
    first, *_ = tokens.encode("\U0001f600", add_special_tokens=False)
    assert tokens.token_bytes(first) == b"\xf0\x9f"
    assert tokens.token_text(first) == "\ufffd"
    assert tokens.token_text(tokens.eos_token_id) == "</s>"
    assert tokens.token_text(10_000) == ""


def test_fewest_tokens_is_a_lower_bound(tmp_path: Path) -> None:
    tokens = load_tokenizer(write(tmp_path, "byte_level"))
    for text in ("", "a", "the sea " * 100, "\u6d77" * 30):
        assert tokens.fewest_tokens(text) <= len(tokens.encode(text))
    assert tokens.fewest_tokens("x" * 10_000) > 100


def test_lone_surrogate_is_named(tmp_path: Path) -> None:
    tokens = load_tokenizer(write(tmp_path, "byte_level"))
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        tokens.encode("a\ud800b")


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer=.*tokenizer\.json.*cannot be read"):
        load_tokenizer(tmp_path)


def test_folder_without_tokenizer_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_template_file_wins_over_config(tmp_path: Path) -> None:
    write(tmp_path, "byte_level", chat_template="config")
    assert load_tokenizer(tmp_path).chat_template.source == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat_template.source == "file"
    (tmp_path / "chat_template.jinja").unlink()
    write_config(tmp_path, chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert load_tokenizer(tmp_path).chat_template.source == "d"
    write_config(tmp_path, chat_template=None)
    assert load_tokenizer(tmp_path).chat_template is None
