"""The router of a MoE layer in one native call: product, choice, weights, and the rows sorted by slot.

Not the torch router (moe/routing/router.py), which says what is computed; for a CPU with native kernels and bf16 rows.
Letters: T tokens, D width, E experts, K top-k, S slots, M rows (choices that are not dropped).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ..native.library import function
from .routing import RoutingConfig

_SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_GROUP_SCORES = {"top2": 0, "max": 1}
_BLOCK = 16  # experts that stand beside each other in the packed router


class RouteArgs(ctypes.Structure):
    """`struct Route` of native/csrc/routing.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "router", "router_bias", "selection_bias", "slot_of")),
        *((name, ctypes.c_int64) for name in ("tokens", "width", "experts", "slots")),
        *(
            (name, ctypes.c_int32)
            for name in ("top_k", "scoring", "renormalize", "num_groups", "top_groups", "group_score")
        ),
        *((name, ctypes.c_float) for name in ("min_weight_sum", "scaling_factor", "jitter")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "logits", "expert_ids", "weights", "slot_ids", "row_tokens", "offsets", "rows", "tokens_per_slot"
            )
        ),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What a router decided.

    Attributes:
        expert_ids: [T, K] i32 logical experts, best first.
        weights: [T, K] f32.
        slot_ids: [T, K] i32, -1 for a dropped choice.
        row_tokens: [T * K] i32, the token of each of the first M rows; rows stand by slot, then token, then k.
        offsets: [S + 1] i32, rows of slot s are [offsets[s], offsets[s + 1]).
        rows: [T, K] i32, the row of each choice, -1 for a dropped one.
        tokens_per_slot: [S] i64.
    """

    expert_ids: torch.Tensor
    weights: torch.Tensor
    slot_ids: torch.Tensor
    row_tokens: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    tokens_per_slot: torch.Tensor


class NativeRouter:
    """The router of one layer, packed.

    Args:
        config: of the routing.
        router: [E, D], any float dtype; computed in fp32.
        num_slots: S.
        bias: [E], part of the logits.
        selection_bias: [E], chooses, never weighs; `sparsemixer` knows none.
        slot_of: [E] i32, which slot stands for an expert, -1 for none; None: expert e stands in slot e.
    """

    def __init__(
        self,
        config: RoutingConfig,
        router: torch.Tensor,
        *,
        num_slots: int,
        bias: torch.Tensor | None = None,
        selection_bias: torch.Tensor | None = None,
        slot_of: torch.Tensor | None = None,
    ) -> None:
        assert selection_bias is None or config.scoring != "sparsemixer", "sparsemixer knows no selection bias"
        self._call = function("moewe_route", RouteArgs)
        self.packed = pack_router(router)
        # What the pointers point to must live as long as they do.
        self._bias = None if bias is None else bias.float().contiguous()
        self._selection_bias = None if selection_bias is None else selection_bias.float().contiguous()
        self._slot_of = None if slot_of is None else slot_of.to(torch.int32).contiguous()
        self.num_slots, self.config = num_slots, config
        self.args = RouteArgs(
            router=self.packed.data_ptr(),
            router_bias=_address(self._bias),
            selection_bias=_address(self._selection_bias),
            slot_of=_address(self._slot_of),
            width=router.shape[1],
            experts=router.shape[0],
            slots=num_slots,
            top_k=config.top_k,
            scoring=_SCORINGS[config.scoring],
            renormalize=config.renormalize,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_score=_GROUP_SCORES[config.group_score],
            min_weight_sum=config.min_weight_sum,
            scaling_factor=config.scaling_factor,
            jitter=config.jitter,
        )

    def place(self, slot_of: torch.Tensor) -> None:
        """Find experts in other slots from now on: [E] i32 (and more); what copied `args` has to do so again."""
        self._slot_of = slot_of.to(torch.int32).contiguous()
        self.args.slot_of = self._slot_of.data_ptr()

    def __call__(self, x: torch.Tensor) -> Routed:
        """Route the rows of `x` [T, D] bf16."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == self.args.width, (x.dtype, x.shape)
        num_tokens, top_k = x.shape[0], self.config.top_k
        ints = torch.empty((4, num_tokens, top_k), dtype=torch.int32)
        weights = torch.empty(num_tokens, top_k)
        logits = torch.empty(num_tokens, self.packed.shape[0] * _BLOCK)
        offsets = torch.empty(self.num_slots + 1, dtype=torch.int32)
        counts = torch.empty(self.num_slots, dtype=torch.int64)
        args, base, step = self.args, ints.data_ptr(), num_tokens * top_k * 4
        args.x, args.tokens, args.logits, args.weights = x.data_ptr(), num_tokens, logits.data_ptr(), weights.data_ptr()
        args.expert_ids, args.slot_ids, args.row_tokens, args.rows = base, base + step, base + 2 * step, base + 3 * step
        args.offsets, args.tokens_per_slot = offsets.data_ptr(), counts.data_ptr()
        self._call(args)
        return Routed(
            expert_ids=ints[0],
            weights=weights,
            slot_ids=ints[1],
            row_tokens=ints[2].view(-1),
            offsets=offsets,
            rows=ints[3],
            tokens_per_slot=counts,
        )


def pack_router(router: torch.Tensor) -> torch.Tensor:
    """Return [ceil(E / 16), D, 16] f32, zero-padded, of a router [E, D]."""
    num_experts, width = router.shape
    padded = torch.zeros(-(-num_experts // _BLOCK) * _BLOCK, width)
    padded[:num_experts] = router
    return padded.view(-1, _BLOCK, width).transpose(1, 2).contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
