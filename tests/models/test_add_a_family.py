"""docs/add-a-family.md is true: the blocks of its worked example, put where they say, run as transformers does."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers

from moewe.models.config import ConfigError
from moewe.models.families import FAMILIES, load_config
from moewe.models.family import Family
from moewe.models.tensor_names import NAMES
from tests.support.comparison import compare_with_reference
from tests.support.fixtures import FIXTURES, checkpoint, random_prompt
from tests.support.harness import generate, greedy
from tests.support.setups import Setup

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add-a-family.md").read_text()
MODULES = {"models/": "moewe.models.", "tests/support/": "tests.support."}


def blocks() -> dict[str, dict[str, Any]]:
    """The entries of the worked example by file, each evaluated with the names of that file."""
    found = {}
    for file, text in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        prefix = next(prefix for prefix in MODULES if file.startswith(prefix))
        module = import_module(MODULES[prefix] + file.removeprefix(prefix).removesuffix(".py"))
        found[file] = eval(f"{{{text}}}", vars(module))
    return found


def test_the_worked_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = blocks()
    (name,), (fixture,) = made["models/families.py"], made["tests/support/fixtures_table.py"]
    assert name not in FAMILIES, "the example is a family now; choose another one"
    monkeypatch.setitem(FIXTURES, fixture, made["tests/support/fixtures_table.py"][fixture])
    path = checkpoint(fixture)
    with pytest.raises(ConfigError, match=name):
        load_config(path)
    monkeypatch.setitem(FAMILIES, name, made["models/families.py"][name])
    monkeypatch.setitem(NAMES, name, made["models/tensor_names.py"][name])
    prompts = [random_prompt(length, seed=length) for length in (33, 1, 17)]
    run = generate(path, prompts, setup=Setup(topology="EP1DP1", max_chunk_tokens=7), params=greedy(16))
    for outcome in run.outcomes:
        compare_with_reference(path, outcome)
    row = made["models/checked.py"][name]
    assert row.fixtures == (fixture,) and row.architecture == FAMILIES[name].architecture
    assert transformers.AutoConfig.from_pretrained(path).architectures == [row.architecture]


def test_the_page_names_what_exists() -> None:
    for file in set(re.findall(r"`((?:models|tests|moe|docs)/[\w/]+\.(?:py|md))`", PAGE)):
        assert (ROOT / file).is_file(), file
    assert "`models/" in PAGE
    right = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and " | " in line]
    switches = {name for cell in right for name in re.findall(r"`(?:moe\.)?(\w+)(?:=|`)", cell)} - {"NAMES"}
    switches |= {"renormalize", "groups", "layers", "only", "reads", "rope_kinds"}
    known = {*Family.__dataclass_fields__, *import_module("moewe.models.family").MoEFamily.__dataclass_fields__}
    assert switches <= known, switches - known
