"""The name map of every family: how checkpoints spell their tensors, and what of ours each of them holds.

Not matching (`name_map`) and no shapes (`parameters`): only the table and the pieces it is put together from.
Names are those inside a decoder layer; `#` stands for the number of an expert. Our own are the same for all families:
`self_attn.{q,k,v,o}_proj`, `mlp.{gate,up,down}_proj`, `mlp.router`, `mlp.experts.#.gate_proj`, `mlp.shared.gate_proj`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

Spellings = tuple["Spelling", ...]


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One stored tensor of a layer. It holds all experts when only our names have a number.

    Attributes:
        stored: its name.
        own: the parameters in it, in order.
        order: `parts`: all rows of the first, then all of the next; `rows`: a row of each in turn; `heads`: for each
            attention head the rows of each.
        transposed: columns come first, [D, rows] instead of [rows, D].
        unsqueezed: stored with a leading dim of 1.
    """

    stored: str
    own: tuple[str, ...]
    order: str = "parts"
    transposed: bool = False
    unsqueezed: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How one family spells its tensors.

    Attributes:
        spellings: of all tensors in layers; where a parameter has several, the first is the one to name to people.
        prefixes: what may stand in front of every name.
        extra: beginnings of names that belong to parts that this version does not run (vision, multi-token prediction).
        extra_layers: layers past the last one are for multi-token prediction, if they hold `eh_proj`.
    """

    spellings: Spellings
    prefixes: tuple[str, ...] = ("",)
    extra: tuple[str, ...] = ()
    extra_layers: bool = False

    @cached_property
    def by_stored(self) -> dict[str, Spelling]:
        """The spellings by stored name."""
        return {spelling.stored: spelling for spelling in self.spellings}

    def stored_for(self, own: str) -> tuple[str, ...]:
        """Return every stored name, inside a layer, of a tensor that holds parameter `own` (with `#`)."""
        return tuple(spelling.stored for spelling in self.spellings if own in spelling.own)


def linear(stored: str, *own: str, order: str = "parts") -> Spellings:
    """Return the tensors of a module with weight, bias and (block-scaled) scales; `own` is `stored` when left out."""
    modules = own or (stored,)
    return tuple(
        Spelling(stored=f"{stored}.{theirs}", own=tuple(f"{module}.{ours}" for module in modules), order=order)
        for theirs, ours in (("weight", "weight"), ("bias", "bias"), ("weight_scale_inv", "weight_scale"))
    )


def stacked(stored: str, *own: str, order: str = "parts", transposed: bool = False) -> Spellings:
    """Return the tensors that stack a projection of all experts: matrices, biases, quantised data and scales."""

    def spell(suffix: str, ours: str, transposed: bool = False) -> Spelling:
        names = tuple(f"{module}.{ours}" for module in own)
        return Spelling(stored=stored + suffix, own=names, order=order, transposed=transposed)

    return (
        spell("", "weight", transposed),
        spell("_bias", "bias"),
        spell("_blocks", "weight"),
        spell("_scales", "weight_scale"),
        *(() if transposed or order != "parts" else (spell("_scale_inv", "weight_scale"),)),
    )


def single(stored: str, own: str, unsqueezed: bool = False) -> Spellings:
    """Return one tensor that is one parameter."""
    return (Spelling(stored=stored, own=(own,), unsqueezed=unsqueezed),)


def attention(q_norm: str = "q_norm", k_norm: str = "k_norm") -> Spellings:
    """Return attention with heads for K and V."""
    projections = sum((linear(f"self_attn.{p}_proj") for p in "qkvo"), ())
    norms = linear(f"self_attn.{q_norm}", "self_attn.q_norm") + linear(f"self_attn.{k_norm}", "self_attn.k_norm")
    return projections + norms


def latent_attention() -> Spellings:
    """Return attention with a latent for K and V, and maybe one for Q."""
    names = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "o_proj")
    kv_b = linear("self_attn.kv_b_proj", "self_attn.kv_b_k", "self_attn.kv_b_v", order="heads")
    return (
        sum((linear(f"self_attn.{name}") for name in names), ())
        + linear("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_proj")
        + kv_b[:1]
    )


def norms(before_attention: str = "input_layernorm", before_ffn: str = "post_attention_layernorm") -> Spellings:
    """Return the two norms of a layer: the one that belongs to attention, the one that belongs to the FFN."""
    return linear(before_attention, "input_layernorm") + linear(before_ffn, "post_attention_layernorm")


def ffn(stored: str, own: str) -> Spellings:
    """Return a gated FFN in three modules."""
    return sum((linear(f"{stored}.{p}_proj", f"{own}.{p}_proj") for p in ("gate", "up", "down")), ())


def experts(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Spellings:
    """Return routed experts, one tensor each."""
    parts = ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj"))
    return sum((linear(f"{block}.experts.#.{theirs}", f"{EXPERT}.{ours}") for theirs, ours in parts), ())


def stacked_experts(gate_up: str, down: str, *, order: str = "parts", transposed: bool = False) -> Spellings:
    """Return routed experts, stacked, gate and up in one tensor."""
    both = (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj")
    return stacked(gate_up, *both, order=order, transposed=transposed) + stacked(
        down, f"{EXPERT}.down_proj", transposed=transposed
    )


EXPERT = "mlp.experts.#"
_STACKED = stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_MLP_EXPERTS = experts("mlp") + _STACKED
_DENSE = norms() + attention() + ffn("mlp", "mlp")
_SELECTION = "mlp.selection_bias"
_ROUTER = linear("mlp.gate", "mlp.router")
_GATE_BIAS = single("mlp.gate.e_score_correction_bias", _SELECTION)
_SHARED = ffn("mlp.shared_experts", "mlp.shared")
_SPARSE = "block_sparse_moe"

_PLAIN = TensorNames(spellings=_DENSE)
_PLAIN_MOE = TensorNames(spellings=_DENSE + _ROUTER + _MLP_EXPERTS)
_SHARED_EXPERTS = TensorNames(spellings=_DENSE + _ROUTER + _GATE_BIAS + _MLP_EXPERTS + _SHARED)
_DEEPSEEK = TensorNames(
    spellings=norms() + latent_attention() + ffn("mlp", "mlp") + _ROUTER + _GATE_BIAS + _MLP_EXPERTS + _SHARED,
    extra_layers=True,
)
# Experts as w1, w3, w2 in a block of its own, or stacked in `mlp` as transformers holds them.
_MIXTRAL = (
    norms()
    + attention()
    + linear(f"{_SPARSE}.gate", "mlp.router")
    + experts(_SPARSE, "w1", "w3", "w2")
    + experts("mlp", "w1", "w3", "w2")
    + stacked_experts(f"{_SPARSE}.experts.gate_up_proj", f"{_SPARSE}.experts.down_proj")
    + _STACKED
)
_GRANITE = (
    norms()
    + attention()
    + linear(f"{_SPARSE}.router.layer", "mlp.router")
    + linear(f"{_SPARSE}.router", "mlp.router")
    + (
        Spelling(
            stored=f"{_SPARSE}.input_linear.weight", own=(f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight")
        ),
        Spelling(stored=f"{_SPARSE}.output_linear.weight", own=(f"{EXPERT}.down_proj.weight",)),
    )
    + stacked_experts(f"{_SPARSE}.experts.gate_up_proj", f"{_SPARSE}.experts.down_proj")
    + linear("shared_mlp.input_linear", "mlp.shared.gate_proj", "mlp.shared.up_proj")
    + linear("shared_mlp.output_linear", "mlp.shared.down_proj")
)
_LLAMA4 = TensorNames(
    spellings=norms()
    + attention()
    + ffn("feed_forward", "mlp")
    + linear("feed_forward.router", "mlp.router")
    + stacked_experts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", transposed=True)
    + ffn("feed_forward.shared_expert", "mlp.shared"),
    prefixes=("", "language_model."),
    extra=("vision_model.", "multi_modal_projector."),
)

NAMES: dict[str, TensorNames] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "mixtral": TensorNames(spellings=_MIXTRAL + _ROUTER),
    "phimoe": TensorNames(spellings=_MIXTRAL + linear("mlp.router")),
    "minimax_m2": TensorNames(
        spellings=_MIXTRAL
        + _ROUTER
        + single(f"{_SPARSE}.e_score_correction_bias", _SELECTION)
        + single("mlp.e_score_correction_bias", _SELECTION)
        + _GATE_BIAS
    ),
    "qwen2_moe": TensorNames(
        spellings=_PLAIN_MOE.spellings
        + ffn("mlp.shared_expert", "mlp.shared")
        + linear("mlp.shared_expert_gate", "mlp.shared_gate")
    ),
    "qwen3_moe": _PLAIN_MOE,
    "olmoe": _PLAIN_MOE,
    "flex_olmo": TensorNames(
        spellings=norms("post_attention_layernorm", "post_feedforward_layernorm") + attention() + _ROUTER + _MLP_EXPERTS
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4_moe": replace(_SHARED_EXPERTS, extra_layers=True),
    "dots1": _SHARED_EXPERTS,
    "solar_open": _SHARED_EXPERTS,
    "ernie4_5_moe": TensorNames(
        spellings=_DENSE
        + _ROUTER
        + single("mlp.moe_statics.e_score_correction_bias", _SELECTION, unsqueezed=True)
        + single("mlp.gate.moe_statics.e_score_correction_bias", _SELECTION, unsqueezed=True)
        + _MLP_EXPERTS
        + _SHARED,
        extra=("model.mtp_",),
    ),
    "hunyuan_v1_moe": TensorNames(
        spellings=norms()
        + attention("query_layernorm", "key_layernorm")
        + linear("mlp.gate.wg", "mlp.router")
        + _MLP_EXPERTS
        + ffn("mlp.shared_mlp", "mlp.shared")
    ),
    "granitemoe": TensorNames(spellings=_GRANITE),
    "granitemoeshared": TensorNames(spellings=_GRANITE),
    "gpt_oss": TensorNames(
        spellings=norms()
        + attention()
        + single("self_attn.sinks", "self_attn.sinks")
        + linear("mlp.router")
        + stacked("mlp.experts.gate_up_proj", f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj", order="rows", transposed=True)
        + stacked("mlp.experts.down_proj", f"{EXPERT}.down_proj", transposed=True)
    ),
    "llama4_text": _LLAMA4,
}
