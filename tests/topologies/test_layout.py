"""Layouts: text, files, presets; several pools are parsed but not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewe.topologies import TopologyError, load_layout, preset_names


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    return str(path)


def test_a_topology_is_a_layout_of_one_pool() -> None:
    assert load_layout("EP2DP1").single().long() == "EP2DP1[adp=2,atp=1,red=0]"
    assert load_layout("EP8DP8", dialect="vllm").single().short() == "EP8DP1"
    assert load_layout("EP8DP8").warnings()
    assert load_layout("EP8DP8", dialect="moewe") == load_layout("EP8DP8")


def test_file_with_pools_and_classes(tmp_path: Path) -> None:
    layout = load_layout(
        write(
            tmp_path,
            "about: two kinds\nprefill: EP4DP16\ndecode: ep64dp3[red=32]\n"
            "classes:\n  short: {pools: [decode], max_prompt_tokens: 512, priority: -1}\n  any: {}\n",
        )
    )
    assert layout.num_ranks == 256
    assert layout.pools["decode"].red == 32
    assert layout.classes["short"].pools == ("decode",) and layout.classes["short"].max_prompt_tokens == 512
    assert layout.classes["any"].pools == ("prefill", "decode")


def test_pools_on_one_line() -> None:
    layout = load_layout("prefill: EP4DP16 | decode: EP64DP3")
    assert list(layout.pools) == ["prefill", "decode"] and layout.num_ranks == 256


def test_several_pools_are_refused_with_a_topology_that_works() -> None:
    with pytest.raises(TopologyError) as error:
        load_layout("dynamo-launch").single()
    assert "prefill: EP4DP16" in str(error.value) and "--topology EP64DP3" in str(error.value)


def test_classes_are_refused_where_they_would_do_nothing(tmp_path: Path) -> None:
    text = "serve: EP2DP1\nclasses:\n  short: {max_prompt_tokens: 512}\n  any: {}\n"
    with pytest.raises(TopologyError, match=r"classes \(short, any\).*leave classes out") as error:
        load_layout(write(tmp_path, text)).single()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- EP2DP1\n", "must be a mapping"),
        ("decode: EP2DP1\ndecode: EP4DP1\n", "given twice"),
        ("decode: 7\n", "decode is 7"),
        ("decode: EP2\n", "did you mean EP2DP1?"),
        ("Decode!: EP2DP1\n", "pool name"),
        ("about: nothing\n", "names no pool"),
        ("decode: EP2DP1\nclasses: [a]\n", "classes must be a mapping"),
        ("decode: EP2DP1\nclasses: {a: {pools: [prefill]}}\n", "list pools of the layout: decode"),
        ("decode: EP2DP1\nclasses: {a: {pool: [decode]}}\n", "unknown key 'pool'"),
        ("decode: EP2DP1\nclasses: {a: {max_prompt_tokens: 0}}\n", "max_prompt_tokens=0"),
        ("decode: EP2DP1\nclasses: {a: {priority: high}}\n", "priority='high'"),
        ("decode: !!python/object:os.system {}\n", "not valid YAML"),
        ("decode: [\n", "line"),
    ],
)
def test_wrong_files_name_the_entry(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(TopologyError) as error:
        load_layout(write(tmp_path, text))
    assert word in str(error.value) and "\n" not in str(error.value) and "layout.yaml" in str(error.value)


def test_missing_file_and_unknown_word() -> None:
    with pytest.raises(TopologyError, match="No such file"):
        load_layout("nowhere/layout.yaml")
    with pytest.raises(TopologyError, match="one-rank"):
        load_layout("banana")
    with pytest.raises(TopologyError, match="did you mean EP2DP1"):
        load_layout("EP2")


def test_every_preset_loads_and_says_what_it_is() -> None:
    assert {"one-rank", "two-ranks", "dynamo-launch"} <= set(preset_names())
    for name in preset_names():
        assert load_layout(name).about
