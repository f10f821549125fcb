"""The grammar: round trips, defaults, dialects, and messages that name the fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.topologies import Topology, TopologyError, expansion, make_topology, parse_topology


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    adp, atp = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    return Topology(ep=adp * atp, dp=draw(st.integers(1, 100)), adp=adp, atp=atp, red=draw(st.integers(0, 300)))


@given(topologies())
def test_long_form_round_trips(topology: Topology) -> None:
    assert parse_topology(topology.long()) == topology
    assert parse_topology(topology.long().lower()) == topology
    assert parse_topology(f"  {topology.long()} ") == topology


@given(st.integers(1, 200), st.integers(1, 200))
def test_short_form_is_attention_data_parallel(ep: int, dp: int) -> None:
    topology = parse_topology(f"EP{ep}DP{dp}")
    assert (topology.adp, topology.atp, topology.red, topology.num_ranks) == (ep, 1, 0, ep * dp)
    assert topology.short() == f"EP{ep}DP{dp}"


@given(st.text(max_size=30))
def test_any_text_parses_or_names_the_problem(text: str) -> None:
    try:
        assert parse_topology(text).num_ranks >= 1
    except TopologyError as error:
        assert "\n" not in str(error)


def test_one_given_attention_axis_decides_the_other() -> None:
    assert parse_topology("EP8DP1[atp=2]").long() == "EP8DP1[adp=4,atp=2,red=0]"
    assert parse_topology("EP8DP1[adp=2]").long() == "EP8DP1[adp=2,atp=4,red=0]"
    assert parse_topology("EP64DP3[red=32]").long() == "EP64DP3[adp=64,atp=1,red=32]"
    assert parse_topology("EP64DP3[adp=64,atp=1,etp=1,pp=1,red=32]") == parse_topology("EP64DP3[red=32]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("EP0DP1", ["ep=0", "at least 1"]),
        ("EP4DP2[adp=3]", ["adp=3", "adp=4,atp=1"]),
        ("EP4DP2[adp=2,atp=4]", ["is 8", "ep=4"]),
        ("EP4DP2[foo=1]", ["'foo'", "adp, atp, red"]),
        ("EP4DP2[adp=4,adp=4]", ["adp twice"]),
        ("EP4DP2[adp=x]", ["adp='x'"]),
        ("EP4DP2[adp=4", ["open bracket"]),
        ("EP4DP2[pp=2]", ["pp above 1"]),
        ("DP3EP64", ["did you mean EP64DP3?"]),
        ("EP64xDP3", ["did you mean EP64DP3?"]),
        ("DEP8", ["did you mean EP8DP1?"]),
        ("TEP8", ["EP8DP1[atp=8]"]),
        ("banana", ["EP2DP1"]),
        ("EP1000000DP1000000", ["1,000,000,000,000 ranks"]),
    ],
)
def test_mistakes_name_the_fix(text: str, words: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        parse_topology(text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "dialect", "long_form"),
    [
        ("EP144DP144", "deepseek", "EP144DP1[adp=144,atp=1,red=0]"),
        ("EP32, DP32", "deepseek", "EP32DP1[adp=32,atp=1,red=0]"),
        ("EP64/DP8/TP8", "vllm", "EP64DP1[adp=8,atp=8,red=0]"),
        ("EP64DP64[red=32]", "vllm", "EP64DP1[adp=64,atp=1,red=32]"),
        ("TP16DP16EP16", "sglang", "EP16DP1[adp=16,atp=1,red=0]"),
        ("EP16DP4", "sglang", "EP16DP1[adp=4,atp=4,red=0]"),
    ],
)
def test_dialects_count_dp_inside_the_group(text: str, dialect: str, long_form: str) -> None:
    assert parse_topology(text, dialect=dialect).long() == long_form


@pytest.mark.parametrize(
    ("text", "dialect", "word"),
    [
        ("EP8DP3", "vllm", "DP3 must divide EP8"),
        ("EP8DP8TP8", "vllm", "TP1"),
        ("DP8", "sglang", "not of the form"),
        ("EP8DP8[adp=8]", "vllm", "leave those out"),
        ("EP8DP8", "trt", "vllm, sglang, deepseek"),
    ],
)
def test_dialect_mistakes(text: str, dialect: str, word: str) -> None:
    with pytest.raises(TopologyError, match=word):
        parse_topology(text, dialect=dialect)


def test_equal_numbers_warn_and_others_do_not() -> None:
    (line,) = parse_topology("EP8DP8").warnings()
    assert "64 ranks" in line and "EP8DP1?" in line
    assert parse_topology("EP8DP8", dialect="vllm").warnings() == []
    assert parse_topology("EP1DP1").warnings() == [] == parse_topology("EP64DP3").warnings()


def test_expansion_says_ranks_replicas_attention_and_experts() -> None:
    text = expansion(parse_topology("EP64DP3[red=32]"), num_experts=256, unit="GPU")
    assert "192 = 3 replicas x 64 GPUs" in text
    assert "data parallel over 64 GPUs" in text
    assert "256 + 32 redundant over 64 GPUs: 5 slots on ranks 0-31, 4 slots on ranks 32-63;" in text
    assert "independent" in text
    assert "10 over 4 GPUs: 3 slots on ranks 0-1, 2 slots on ranks 2-3;" in expansion(  # P-LOAD-24
        make_topology(4), num_experts=10, unit="GPU"
    )
    assert "heads sharded over 8 ranks" in expansion(make_topology(8, atp=8))
    assert "4 parts of 2 ranks" in expansion(make_topology(8, atp=2))
    assert "dense" in expansion(make_topology(1, 4), num_experts=0)
