"""The table of what was checked: it is that of the families, each claim has its test, and the page is up to date."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from moewe.models.checked import (
    CHECKED,
    CHECKS,
    CHUNKS,
    CLAMPED,
    EXPERT_BIAS,
    GATED,
    GROUPS,
    LAYER_NORM,
    MLA,
    MOE,
    POST_NORM,
    QK_NORM,
    RUNS,
    SCALED,
    SELECTION,
    SHARED,
    SIGMOID,
    SINKS,
    SPARSEMIXER,
    TEMPERATURE,
    TRANSFORMERS,
    WINDOWS,
    as_markdown,
)
from moewe.models.families import FAMILIES
from moewe.models.family_rules import clamped, four_multipliers, query_temperature
from moewe.models.layer_rules import chunks_with_rotary, full_attention
from moewe.models.model_type import ALIASES
from moewe.models.tensor_names import NAMES
from tests.support.fixtures import FIXTURES
from tests.support.matrix import MATRIX

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = [(family, check) for family, row in CHECKED.items() for check in row.checks]


def test_rows_are_the_families() -> None:
    assert set(CHECKED) == set(FAMILIES)
    for name, row in CHECKED.items():
        assert row.architecture == FAMILIES[name].architecture
        assert (row.kind == MOE) == (FAMILIES[name].moe is not None)
        assert {*row.also} == {alias for alias, known in ALIASES.items() if known == name}
        assert name in NAMES


@pytest.mark.parametrize("name", CHECKED)
def test_what_shapes_a_family_is_what_its_entry_switches(name: str) -> None:
    family, moe = FAMILIES[name], FAMILIES[name].moe
    switches = {
        MLA: family.latent,
        GROUPS: moe and moe.groups,
        SIGMOID: moe and moe.scoring == "sigmoid",
        SPARSEMIXER: moe and moe.scoring == "sparsemixer",
        SELECTION: moe and moe.selection_bias,
        SHARED: moe and moe.shared_width and not moe.shared_gate,
        GATED: moe and moe.shared_gate,
        QK_NORM: family.qk_norm,
        WINDOWS: family.attention not in (full_attention, chunks_with_rotary),
        RUNS: family.attention is chunks_with_rotary,
        SINKS: family.sinks,
        CLAMPED: moe and moe.activation is clamped,
        EXPERT_BIAS: moe and moe.expert_bias,
        LAYER_NORM: family.norm == "layer",
        POST_NORM: family.norm_after,
        SCALED: family.more is four_multipliers,
        TEMPERATURE: family.more is query_temperature,
    }
    assert set(CHECKED[name].has) == {word for word, on in switches.items() if on}


def test_every_fixture_belongs_to_one_family() -> None:
    stands = [fixture for row in CHECKED.values() for fixture in row.fixtures]
    assert sorted(stands) == sorted(FIXTURES)
    for name, row in CHECKED.items():
        for fixture in row.fixtures:
            assert getattr(transformers, FIXTURES[fixture][0]).model_type == name


@pytest.mark.parametrize(("family", "check"), CLAIMS)
def test_every_claim_has_its_test(family: str, check: str) -> None:
    file, _, function = CHECKS[check].test.partition("::")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    marks = getattr(getattr(module, function), "pytestmark", [])
    parameters = {word for mark in marks if mark.name == "parametrize" for word in words(mark.args[1])}
    fixtures = CHECKED[family].fixtures
    if check in CHECKED[family].more:
        assert any(name in parameters or f'"{name}"' in inspect.getsource(module) for name in fixtures)
    else:
        assert set(fixtures) <= parameters


def words(values: Any) -> list[str]:
    """All texts in the values of a parametrization."""
    found: list[str] = []
    for value in values:
        parts = getattr(value, "values", value)
        parts = parts if isinstance(parts, (tuple, list)) else [parts]
        found += [part for part in parts if isinstance(part, str)]
    return found


def test_every_topology_and_chunk_that_is_claimed_is_in_the_matrix() -> None:
    claimed = {
        (fixture, topology, chunk)
        for row in CHECKED.values()
        for fixture in row.fixtures
        for number, topology in enumerate(row.topologies)
        for chunk in {CHUNKS[0], *CHUNKS[number + 1 : number + 2]}
    }
    assert claimed <= set(MATRIX)


def test_tests_run_on_no_older_transformers_than_the_table_names() -> None:
    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:2]]

    assert numbers(transformers.__version__) >= numbers(TRANSFORMERS)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "families.md").read_text() == as_markdown(), "run: make families"


def test_the_readme_names_every_family() -> None:
    page = (ROOT / "README.md").read_text()
    assert f"{len(CHECKED)} families" in page and "docs/families.md" in page


def test_the_table_needs_no_torch() -> None:
    code = "import sys, moewe.models.checked; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
