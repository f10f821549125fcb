"""What a MoE layer is made of, as it sees them: switches, weights, and its part of native calls.

Not the layer (layer.py). Letters: E logical experts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .activation import Activation
from .gated import ExpertWeights, GatedFFN
from .native_experts import ExpertFfnArgs
from .native_route import RouteArgs
from .routing import RoutingConfig


class ExpertSwitches(Protocol):
    """What differs between the MoE layers of one model and of another; `models.config.MoEConfig` has it."""

    @property
    def routing(self) -> RoutingConfig:
        """How logits become experts."""
        ...

    @property
    def activation(self) -> Activation:
        """Of routed experts."""
        ...

    @property
    def weigh_input(self) -> bool:
        """A token's weight multiplies what goes into its only expert, not what comes out."""
        ...


class LayerExperts(Protocol):
    """What a MoE layer holds on this rank; `models.weights.MoEWeights` is one and says the shapes."""

    @property
    def router(self) -> torch.Tensor:
        """[E, D]."""
        ...

    @property
    def experts(self) -> ExpertWeights:
        """Of the local slots, in slot order."""
        ...

    @property
    def router_bias(self) -> torch.Tensor | None:
        """[E]."""
        ...

    @property
    def selection_bias(self) -> torch.Tensor | None:
        """[E] f32."""
        ...

    @property
    def shared(self) -> GatedFFN | None:
        """The shared experts as one FFN."""
        ...

    @property
    def shared_gate(self) -> torch.Tensor | None:
        """[1, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class NativeMoE:
    """Arguments of native calls that are fixed for a layer; they point into what the layer holds.

    Attributes:
        route: of the router.
        experts: of the local slots.
        shared: of the shared experts.
        shared_gate: [1, D].
    """

    route: RouteArgs
    experts: ExpertFfnArgs
    shared: ExpertFfnArgs | None
    shared_gate: torch.Tensor | None
