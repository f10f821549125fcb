"""What a launch tells Triton's compiler, and what is read out of machine code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moewe.native.gpu import TARGETS, Launch
from moewe.native.gpu.machine_code import parse_instructions, parse_usage
from moewe.native.gpu.signature import signature_of

SASS = """
        Function : kernel
        /*0000*/                   MOV R1, c[0x0][0x28] ;                 /* 0x00000a0000017a02 */
                                                                          /* 0x000fe20000000f00 */
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;                /* 0x0000000402048981 */
        /*0020*/                   LDG.E.U8 R8, [R2.64] ;
        /*0030*/             @UP1  LDGSTS.E.BYPASS.128 [R8], [R2.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R8, R4, gdesc[UR4], R8 ;
        /*0060*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0070*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;
        /*0080*/                   FFMA R3, R3, R4, R5 ;
        /*0090*/                   STL.64 [R1], R2 ;
"""


def kernel(*names: str, fixed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(__name__="kernel", arg_names=names, do_not_specialize=fixed)


def test_instructions_are_counted_by_what_they_do() -> None:
    found = parse_instructions(SASS)
    assert (found.total, found.tensor, found.loads, found.wide_loads, found.fused, found.local) == (10, 3, 3, 2, 1, 1)
    assert found.by_name["LDG.E.U8"] == 1
    with pytest.raises(ValueError, match="no machine instruction"):
        parse_instructions("cuobjdump fatal   : does not contain device code")


def test_registers_and_spilled_bytes_are_read() -> None:
    line = "Function kernel:\n  REG:40 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:400 TEXTURE:0\n"
    usage = parse_usage(line)
    assert (usage.registers, usage.stack_bytes) == (40, 16)
    with pytest.raises(ValueError, match="no resource usage"):
        parse_usage("")


def test_a_signature_has_what_the_launcher_would_see() -> None:
    rows = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    launch = Launch(
        kernel=kernel("x", "bias", "width", "one", "tokens", "scale", "BLOCK", fixed=("tokens",)),
        grid=(1,),
        arguments={"x": rows, "bias": None, "width": 48, "one": 1, "tokens": 32, "scale": 1.0},
        constants={"BLOCK": 64},
    )
    signature = signature_of(launch)
    assert signature.types == {
        "x": "*bf16", "bias": "constexpr", "width": "i32", "one": "constexpr", "tokens": "i32", "scale": "fp32",
        "BLOCK": "constexpr",
    }  # fmt: skip
    assert signature.constants == {"BLOCK": 64, "bias": None, "one": 1}
    assert signature.aligned == ("x", "width")
    assert str(signature) == "x:*bf16/16 bias=None width:i32/16 one=1 tokens:i32 scale:fp32 BLOCK=64"


def test_a_view_that_begins_between_16_bytes_is_not_aligned() -> None:
    rows = torch.zeros(64, dtype=torch.bfloat16)
    for start, aligned in ((0, ("x",)), (1, ())):
        launch = Launch(kernel=kernel("x"), grid=(1,), arguments={"x": rows[start:]}, constants={})
        assert signature_of(launch).aligned == aligned


def test_a_grid_without_programs_starts_nothing() -> None:
    Launch(kernel=None, grid=(0, 4), arguments={}, constants={}).run()


def test_only_newer_targets_convert_fp8() -> None:
    assert {t.name: t.has_fp8 for t in TARGETS.values()} == {"sm_80": False, "sm_90": True, "sm_100": True}
