"""What a model weighs: a plain record by which planner and byte budget know a model without importing it.

Not a config and not a loader. `models.footprint` makes one from a normalised config; anyone may write one by hand.
Units: bytes of the stored number format, parameters are not kept; per-token figures are for one token of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kv_sizes import KVGroup


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """Byte sizes of one model, summed over layers unless a name says otherwise.

    Attributes:
        name: what to call the model in a printed budget.
        num_layers: decoder layers.
        num_moe_layers: layers with routed experts (0 for a dense model).
        num_experts: E, routed experts of a MoE layer (0 for a dense model).
        top_k: K, experts a token (0 for a dense model).
        attention_bytes: attention weights with their norms.
        attention_shares: (atp, attention weights of the fullest of so many ranks), for all that can divide the heads.
        dense_bytes: dense FFN weights, routers and remaining norms.
        shared_bytes: shared experts with their gates.
        expert_bytes: ONE routed expert of ONE layer.
        embedding_bytes: the embedding matrix.
        head_bytes: the output head; 0 when it is the embedding.
        kv_groups: its cache groups, with the bytes of a token over all layers and KV heads of each.
        hidden_size: D.
        vocab_size: rows of the embedding.
        max_model_len: positions that the model was made for.
        activation_itemsize: bytes of an activation element.
        flops_per_token: multiply-adds times two of one token through all weights it touches, without attention scores.
        expert_flops: the same of one token through ONE routed expert; 0 where nobody worked it out.
    """

    name: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    attention_bytes: int
    dense_bytes: int
    shared_bytes: int
    expert_bytes: int
    embedding_bytes: int
    head_bytes: int
    kv_groups: tuple[KVGroup, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    activation_itemsize: int
    flops_per_token: int
    expert_flops: int = 0
    attention_shares: tuple[tuple[int, int], ...] = ()

    def attention_bytes_at(self, atp: int) -> int:
        """Return the attention weights of the fullest of `atp` ranks; where nobody worked it out, an equal part."""
        if atp == 1:
            return self.attention_bytes
        return dict(self.attention_shares).get(atp, -(-self.attention_bytes // atp))

    @property
    def replicated_bytes(self) -> int:
        """Weights that every rank of a group holds where attention is data parallel: all but the routed experts."""
        return self.attention_bytes + self.dense_bytes + self.shared_bytes + self.embedding_bytes + self.head_bytes

    @property
    def routed_bytes(self) -> int:
        """All routed experts of all layers, each counted once."""
        return self.num_moe_layers * self.num_experts * self.expert_bytes

    @property
    def total_bytes(self) -> int:
        """All weights, each counted once."""
        return self.replicated_bytes + self.routed_bytes
