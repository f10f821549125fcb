"""Which entry of the table of families a config.json is of.

Not the table: it is an argument. Names are those that transformers gives (`model_type`, `architectures`).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from .family import Family
from .json_fields import Fields, show

_log = logging.getLogger(__name__)

# Model types whose models another entry runs as they are.
ALIASES = {"kimi_k2": "deepseek_v3", "llama4": "llama4_text"}
# The entry whose models also come with a vision part around them.
_WRAPPED = "llama4_text"
# Classes that models of an entry also go by.
_OTHER_CLASSES = {"Llama4ForConditionalGeneration": _WRAPPED, "PhiMoEForCausalLM": "phimoe"}
# What a config around a text_config says for both.
_OUTER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config", "compression_config")
# Fields of training, of the library that wrote the file, or said again elsewhere in it: they change no output here.
WITHOUT_EFFECT = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_dropout", "attn_pdrop",
    "auto_map", "aux_loss_alpha", "cls_token_id", "embd_dropout", "embd_pdrop", "eod_token_id", "ep_size", "head_dim",
    "hidden_dropout", "hidden_dropout_prob", "initializer_range", "input_jitter_noise", "intermediate_size",
    "interleave_moe_layer_step", "mask_token_id", "max_window_layers", "mode", "model_type", "no_rope_layer_interval",
    "num_nextn_predict_layers", "output_router_logits", "pad_token_id", "pretraining_tp", "qk_head_dim", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "seq_aux", "sliding_window", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip


def find_family(fields: Fields, table: Mapping[str, Family]) -> str:
    """Return the key of the family that `model_type` names, or `architectures` where `model_type` is absent."""
    model_type, stated = fields.raw("model_type"), fields.raw("architectures")
    by_class = {family.architecture: name for name, family in table.items()} | _OTHER_CLASSES
    listed = [a for a in stated if isinstance(a, str) and a in by_class] if isinstance(stated, list) else []
    name = ALIASES.get(model_type, model_type) if isinstance(model_type, str) else None
    if name in table:
        if listed and by_class[listed[0]] != name:
            raise fields.refuse("model_type", model_type, f"contradicts architectures = {show(listed)}; correct one")
        if stated and not listed:
            _log.warning(
                "%s: architectures = %s is not a class of model_type = %s; going by model_type",
                fields.where, show(stated), show(model_type),
            )  # fmt: skip
        return str(name)
    if model_type is None and listed:
        return by_class[listed[0]]
    known = [*table, *ALIASES]
    near = difflib.get_close_matches(model_type[:64], known, n=1, cutoff=0.4) if isinstance(model_type, str) else []
    hint = f" (the nearest is {near[0]})" if near else ""
    raise fields.refuse("model_type", model_type, f"is no family that moewe runs{hint}; it runs: {', '.join(known)}")


def text_fields(fields: Fields, name: str) -> Fields:
    """Return the fields of the text model of family `name`: those of `text_config` where the family has that."""
    if name != _WRAPPED or fields.raw("text_config") is None:
        return fields
    section = fields.section("text_config")
    if section.raw("model_type") not in (None, name):
        raise section.refuse("model_type", section.raw("model_type"), f"must be {name}; correct it")
    outer: dict[str, Any] = {
        field: fields.content[field]
        for field in _OUTER
        if fields.content.get(field) is not None and section.content.get(field) is None
    }
    if fields.raw("tie_word_embeddings") and not section.raw("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", True, "contradicts text_config, which does not tie; correct one")
    return Fields(content=section.content | outer, where=section.where, defaults={})
