"""What gated FFNs are made of: the weights of one and of all experts of a rank.

Not their computation (experts.py, native_experts.py) and not the activation inside (activation.py).
Letters: S slots of this rank, D width, F expert width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from ..quant import Matrix, PackedTensor, QuantTensor


class GatedFFN(Protocol):
    """One gated FFN for all rows; `models.weights.DenseFFN` is one."""

    @property
    def w13(self) -> Matrix:
        """[2F, D], gate rows first."""
        ...

    @property
    def w2(self) -> Matrix:
        """[D, F]."""
        ...

    @property
    def b13(self) -> torch.Tensor | None:
        """[2F]."""
        ...

    @property
    def b2(self) -> torch.Tensor | None:
        """[D]."""
        ...


@dataclass(kw_only=True)
class ExpertWeights:
    """The experts of one layer that a rank holds, in slot order.

    Attributes:
        w13: [S, 2F, D], gate rows first, then up rows.
        w2: [S, D, F].
        b13: [S, 2F], gate first, then up; None where experts have no biases.
        b2: [S, D].
    """

    w13: Matrix
    w2: Matrix
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Exact bytes of one expert."""
        return sum(math.prod(part.shape[1:]) * part.element_size() for part in self._stacks())

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        """Return everything that makes up one expert, as views; alike for all slots of ranks that hold one format."""
        return [part[slot] for part in self._stacks()]

    def _stacks(self) -> list[torch.Tensor]:
        """Return what holds the experts, [S, ..] each."""
        stacks: list[torch.Tensor | None] = []
        for part in (self.w13, self.w2, self.b13, self.b2):
            if isinstance(part, PackedTensor):
                stacks += [part.data, part.scales, part.grid]
            else:
                stacks += [part.data, part.scales, part.zeros] if isinstance(part, QuantTensor) else [part]
        return [stack for stack in stacks if stack is not None]

    @cached_property
    def has_grouped_product(self) -> bool:
        """True where torch multiplies all slots in one call: on a CPU, from 2.10 on, with rows of whole 16 bytes."""
        plain = self._plain_and_aligned
        return plain is not None and plain.device.type == "cpu"

    @cached_property
    def has_grouped_product_on_device(self) -> bool:
        """True where torch does so with counts on the device that the host never sees: bf16, on GPUs from Hopper on.

        On other GPUs the same call reads the counts on the host.
        """
        plain = self._plain_and_aligned
        if plain is None or plain.dtype != torch.bfloat16:
            return False
        return plain.device.type != "cuda" or torch.cuda.get_device_capability(plain.device) >= (9, 0)

    @property
    def _plain_and_aligned(self) -> torch.Tensor | None:
        """`w13` where one call can multiply all slots, else None."""
        if not isinstance(self.w13, torch.Tensor) or not isinstance(self.w2, torch.Tensor):
            return None
        aligned = all(t.shape[2] * t.element_size() % 16 == 0 for t in (self.w13, self.w2))
        return self.w13 if aligned and hasattr(F, "grouped_mm") else None
