"""The dense source model, SmolLM2-135M-Instruct in a GGUF file, read as numpy arrays.

Not a general GGUF reader: it knows this one file's architecture (llama) and tensor names, and nothing of experts.
Arrays are fp32 in Hugging Face orientation [out, in]; D 576, H 9 query heads, 3 KV heads, head width 64, 30 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .errors import DemoError


def to_rotate_half(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder query or key rows from GGUF's interleaved rotary pairs to the two halves that Hugging Face rotates.

    Args:
        rows: [H * Dh, D]; within a head, rows 2i and 2i+1 rotate together.

    Returns:
        [H * Dh, D]; within a head, rows i and i + Dh/2 rotate together.

    Example: one head of four rows [0, 1, 2, 3] becomes [0, 2, 1, 3].
    """
    heads = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


class DenseSource:
    """Metadata and dequantised tensors of the GGUF file; memory-mapped, one tensor in memory at a time."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise DemoError(f"{path.name}: general.architecture is {architecture!r}, expected 'llama'")
        self.num_layers: int = self.field("llama.block_count")
        self.hidden_size: int = self.field("llama.embedding_length")
        self.ffn_width: int = self.field("llama.feed_forward_length")
        self.num_heads: int = self.field("llama.attention.head_count")
        self.num_kv_heads: int = self.field("llama.attention.head_count_kv")
        self.head_dim: int = self.field("llama.rope.dimension_count")
        self.vocab_size: int = self.field("llama.vocab_size")
        self.max_positions: int = self.field("llama.context_length")
        self.rope_theta: float = self.field("llama.rope.freq_base")
        self.norm_eps: float = round(self.field("llama.attention.layer_norm_rms_epsilon"), 9)

    def field(self, name: str) -> Any:
        """One metadata value as a Python object."""
        return self._reader.fields[name].contents()

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised to fp32."""
        stored = self._tensors[name]
        return np.asarray(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32)

    def attention(self, layer: int) -> dict[str, np.ndarray]:
        """`q_proj`, `k_proj`, `v_proj`, `o_proj` of one layer, rotary order put right."""
        block = f"blk.{layer}."
        return {
            "q_proj": to_rotate_half(self.tensor(block + "attn_q.weight"), self.num_heads),
            "k_proj": to_rotate_half(self.tensor(block + "attn_k.weight"), self.num_kv_heads),
            "v_proj": self.tensor(block + "attn_v.weight"),
            "o_proj": self.tensor(block + "attn_output.weight"),
        }

    def norms(self, layer: int) -> dict[str, np.ndarray]:
        """`input_layernorm` and `post_attention_layernorm` of one layer, [D] each."""
        block = f"blk.{layer}."
        return {
            "input_layernorm": self.tensor(block + "attn_norm.weight"),
            "post_attention_layernorm": self.tensor(block + "ffn_norm.weight"),
        }

    def ffn(self, layer: int) -> dict[str, np.ndarray]:
        """`gate_proj` and `up_proj` [F, D], `down_proj` [D, F] of one layer."""
        block = f"blk.{layer}."
        return {name + "_proj": self.tensor(f"{block}ffn_{name}.weight") for name in ("gate", "up", "down")}

    def embedding(self) -> np.ndarray:
        """[V, D]; the output head is the same matrix."""
        return self.tensor("token_embd.weight")

    def final_norm(self) -> np.ndarray:
        """[D]."""
        return self.tensor("output_norm.weight")

    def vocabulary(self) -> tuple[Sequence[str], Sequence[str], Sequence[int]]:
        """Token texts by id, merges in rank order, ids of the special tokens."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges: list[str] = self.field("tokenizer.ggml.merges")
        kinds: list[int] = self.field("tokenizer.ggml.token_type")
        special = [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
        return tokens, merges, special
