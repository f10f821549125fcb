"""The table of hardware: every figure with a source and in its unit, and refusals of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moewe.topologies import TopologyError
from moewe.topologies.planner.hardware import FIGURES, hardware_names, load_hardware, local_host

EXPECTED = {
    "a100", "b200", "b300", "gb200-nvl72", "gb300-nvl72", "h100", "h20", "h200", "h800", "mi300x", "vr-nvl72",
}  # fmt: skip
GOOD = {
    figure: {"value": 1.0, "source": "a data sheet"}
    for figure in FIGURES
    if figure not in ("fp8_flops", "fp4_flops", "int8_flops")
} | {"decode_copies": {"value": "ranks", "source": "a guess"}}


def test_the_table_has_what_it_should() -> None:
    assert set(hardware_names()) == EXPECTED
    assert [name for name in hardware_names() if load_hardware(name).preliminary] == ["vr-nvl72"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_figure_has_a_source_and_a_plausible_size(name: str) -> None:
    hardware = load_hardware(name)
    assert all(len(source) > 3 for _, source in hardware.sources)
    assert 8e10 <= hardware.memory_bytes <= 4e11 and 2e12 <= hardware.memory_bandwidth <= 3e13
    assert hardware.scale_out_bandwidth < hardware.scale_up_bandwidth < hardware.memory_bandwidth
    assert hardware.domain_size in (8, 72)
    assert hardware.flops("bf16") <= hardware.flops("fp8") <= hardware.flops("fp4")
    assert 1e-6 < hardware.dispatch_latency < hardware.between_dispatch_latency < 1e-3


def test_narrow_products_fall_back_to_wider_ones() -> None:
    a100, h200 = load_hardware("a100"), load_hardware("h200")
    assert a100.flops("fp4") == a100.flops("fp8") == a100.bf16_flops < a100.flops("int8")
    assert h200.flops("fp4") == h200.fp8_flops
    b300 = load_hardware("b300")
    assert b300.int8_flops < b300.flops("int8") == b300.bf16_flops, "nobody takes the slower product"
    host = local_host(cores=2, memory_bytes=1e9, memory_bandwidth=1e9, bf16_flops=1e9, int8_flops=2e9)
    assert host.flops("int8") == 2e9 and host.flops("fp8") == 1e9, "a CPU multiplies fp8 weights in bf16"


@pytest.mark.parametrize(("name", "shown_mib"), [("h200", 143_771), ("b200", 183_359)])
def test_memory_is_what_the_driver_shows(name: str, shown_mib: int) -> None:
    assert shown_mib <= load_hardware(name).memory_bytes / 2**20 < 1.01 * shown_mib


def written(folder: Path, **changes: object) -> str:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (GOOD | changes).items() if value is not None}))
    return str(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    hardware = load_hardware(written(tmp_path, name="mine", preliminary=True))
    assert (hardware.name, hardware.preliminary, hardware.memory_bandwidth) == ("mine", True, 1.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_bandwidth": None}, "lacks memory_bandwidth"),
        ({"colour": 1}, "unknown entry 'colour'"),
        ({"memory_bytes": 80}, "give value and source"),
        ({"memory_bytes": {"value": "8e10", "source": "s"}}, "write 4.8e\\+12"),
        ({"memory_bytes": {"value": -1, "source": "s"}}, "number above 0"),
        ({"memory_bytes": {"value": float("nan"), "source": "s"}}, "number above 0"),
        ({"memory_bytes": {"value": True, "source": "s"}}, "number above 0"),
        ({"within_efficiency": {"value": 2, "source": "s"}}, "at most 1"),
        ({"scale_up_size": {"value": 8.5, "source": "s"}}, "whole number"),
        ({"decode_copies": {"value": "all", "source": "s"}}, "use ranks or experts"),
        ({"preliminary": "yes"}, "true or false"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(TopologyError, match=says) as error:
        load_hardware(written(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(TopologyError, match="did you mean gb200-nvl72"):
        load_hardware("gb200-nvl27")
    with pytest.raises(TopologyError, match="nowhere"):
        load_hardware("nowhere.yaml")
