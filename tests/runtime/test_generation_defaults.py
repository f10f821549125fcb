"""Sampling defaults of a model: what its generation_config.json says, what wins over it, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from moewe.runtime.config import ModelOptions
from moewe.runtime.generation_defaults import GenerationDefaults, generation_defaults
from moewe.runtime.params import SamplingParams


def read(folder: Path, content: Any = None, **options: str) -> GenerationDefaults:
    if content is not None:
        (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return generation_defaults(ModelOptions(model="m", path=str(folder), **options))


SAID = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 2048}
MEANT = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 2048}


def test_the_models_file_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == GenerationDefaults()
    assert read(tmp_path, SAID).sampling == MEANT
    assert read(tmp_path, SAID | {"do_sample": None, "top_k": None}).sampling == {
        k: v for k, v in MEANT.items() if k != "top_k"
    }
    assert read(tmp_path, {"eos_token_id": [2, 9], "bos_token_id": 1}) == GenerationDefaults(
        source="generation_config.json"
    )


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    defaults = read(tmp_path, SAID | {"do_sample": False, "min_p": 0.1, "repetition_penalty": 1.1})
    assert defaults.sampling == {"temperature": 0.0, "max_tokens": 2048, "repetition_penalty": 1.1}
    assert defaults.params({}).temperature == 0 and defaults.lacking == ()
    warm = defaults.params({"temperature": 1.0})
    assert warm == SamplingParams(temperature=1.0, max_tokens=2048, repetition_penalty=1.1)


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_it_can_be_switched_off(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, SAID, generation_config=word) == GenerationDefaults()


def test_another_folder_or_file_also_brings_its_end_tokens(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 9}))
    for path in (other, other / "generation_config.json"):
        defaults = read(tmp_path, SAID, generation_config=str(path))
        assert defaults.sampling == {"temperature": 0.3} and defaults.end_token_ids == (9,)
        assert str(path) in defaults.source
    with pytest.raises(ValueError, match=r"generation_config='/nowhere' names no file.*use auto.*none") as caught:
        read(tmp_path, generation_config="/nowhere")
    assert "\n" not in str(caught.value)


def test_a_request_wins_over_the_file_and_that_over_a_command(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"temperature": 0.6, "max_new_tokens": 50})
    command = {"max_tokens": 256, "temperature": 0.0, "top_p": 0.5}
    params = defaults.params({"temperature": 0.9}, otherwise=command)
    assert (params.temperature, params.max_tokens, params.top_p) == (0.9, 50, 0.5)
    assert defaults.params({}, room=7).max_tokens == 7
    assert defaults.params({"max_tokens": 9}, room=7).max_tokens == 9  # who asks for too much is told so
    assert GenerationDefaults().params({}, room=7) == SamplingParams()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"temperature": -1}, "generation_config.json: temperature = -1"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"temperature": True}, "temperature = True"),
        ({"top_p": 0}, "top_p = 0"),
        ({"min_p": 2}, "min_p = 2"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"top_k": 1.5}, "top_k = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"do_sample": "no"}, "do_sample = 'no' must be true or false"),
        ({"do_sample": False, "temperature": "hot"}, "temperature = 'hot'"),
        ("[]", "generation_config.json"),
        ('{"temperature": NaN}', "generation_config.json"),
    ],
)  # fmt: skip
def test_wrong_values_are_one_line(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, content)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_done_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="moewe")
    neutral = {"repetition_penalty": 1.0, "min_p": 0, "num_beams": 1, "stop_strings": [], "forced_eos_token_id": None}
    assert read(tmp_path, neutral).lacking == ()
    read(tmp_path, neutral).report()
    assert caplog.records == []
    asks = {"top_p": 0.9, "repetition_penalty": 1.05, "min_p": 0.1, "suppress_tokens": [3], "typical_p": 0.5}
    read(tmp_path, asks).report()
    told, warned = caplog.records
    for name in ("top_p=0.9", "repetition_penalty=1.05", "min_p=0.1"):
        assert name in told.getMessage()
    assert told.levelno == logging.INFO
    assert warned.levelno == logging.WARNING and "\n" not in warned.getMessage()
    for name in ("typical_p=0.5", "suppress_tokens=[3]", "generation_config.json"):
        assert name in warned.getMessage()
