"""What a decoder is made of, and what can change in it while it serves.

Not the decoder (decoder.py). Records only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..moe.layer import MoELayer
from .latent import LatentAttentionBlock
from .layers import AttentionBlock, Norm
from .weights import DenseFFN


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One decoder layer, ready to run; exactly one of `dense` and `moe` is set."""

    input_norm: Norm
    attention: AttentionBlock | LatentAttentionBlock
    post_attention_norm: Norm
    dense: DenseFFN | None
    moe: MoELayer | None


@dataclass(frozen=True, kw_only=True)
class ExpertChange:
    """What a slot of this rank is to hold from now on: `tensors` as `slot_tensors` gives them, in other memory."""

    moe_layer: int
    slot: int
    tensors: list[torch.Tensor]
