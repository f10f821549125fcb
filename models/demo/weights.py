"""The demo checkpoint's tensors: dense FFN neurons laid out as shared and routed experts, in one safetensors file.

Not the choice of neurons (`carve.py` made it, `carving.npz` holds it): this only gathers rows and columns.
bf16 throughout, `e_score_correction_bias` fp32; E 16 experts, F 64 neurons each, shared 512, D 576.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .model_files import EXPERT_WIDTH, NUM_EXPERTS, SHARED_WIDTH

if TYPE_CHECKING:
    from .dense_source import DenseSource

CARVING_FILE = Path(__file__).with_name("carving.npz")
ITEM_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True)
class Carving:
    """What the calibration decided.

    Attributes:
        neuron_order: [L, 1536] u16; the first 512 are the shared expert, then 64 for each of the 16 experts.
        router: [L, E, D] f16, no bias.
    """

    neuron_order: np.ndarray
    router: np.ndarray


def load_carving(path: Path = CARVING_FILE) -> Carving:
    """Read `carving.npz`."""
    with np.load(path, allow_pickle=False) as stored:
        return Carving(neuron_order=stored["neuron_order"], router=stored["router"])


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 to bf16 (nearest, ties to even), as the u16 bit patterns that numpy has no type for."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def demo_tensors(source: DenseSource, carving: Carving) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint under its Hugging Face name, fp32, in file order."""
    yield "model.embed_tokens.weight", source.embedding()
    for layer in range(source.num_layers):
        prefix = f"model.layers.{layer}."
        for name, values in source.norms(layer).items():
            yield f"{prefix}{name}.weight", values
        for name, values in source.attention(layer).items():
            yield f"{prefix}self_attn.{name}.weight", values
        yield from _moe_tensors(source, carving, layer)
    yield "model.norm.weight", source.final_norm()


def _moe_tensors(source: DenseSource, carving: Carving, layer: int) -> Iterator[tuple[str, np.ndarray]]:
    prefix = f"model.layers.{layer}.mlp."
    yield prefix + "gate.weight", carving.router[layer].astype(np.float32)
    yield prefix + "gate.e_score_correction_bias", np.zeros(NUM_EXPERTS, np.float32)
    ffn = source.ffn(layer)
    order = carving.neuron_order[layer].astype(np.int64)
    groups = [("shared_experts", order[:SHARED_WIDTH])]
    groups += [(f"experts.{e}", row) for e, row in enumerate(order[SHARED_WIDTH:].reshape(-1, EXPERT_WIDTH))]
    for name, neurons in groups:
        yield f"{prefix}{name}.gate_proj.weight", ffn["gate_proj"][neurons]
        yield f"{prefix}{name}.up_proj.weight", ffn["up_proj"][neurons]
        yield f"{prefix}{name}.down_proj.weight", ffn["down_proj"][:, neurons]


def demo_shapes(source: DenseSource) -> dict[str, tuple[int, ...]]:
    """Shapes of `demo_tensors`, in the same order, without reading a weight."""
    width, kv_width = source.hidden_size, source.num_kv_heads * source.head_dim
    query_width = source.num_heads * source.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (source.vocab_size, width)}
    for layer in range(source.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (width,)
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        shapes[prefix + "self_attn.q_proj.weight"] = (query_width, width)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_width, width)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_width, width)
        shapes[prefix + "self_attn.o_proj.weight"] = (width, query_width)
        shapes[prefix + "mlp.gate.weight"] = (NUM_EXPERTS, width)
        shapes[prefix + "mlp.gate.e_score_correction_bias"] = (NUM_EXPERTS,)
        groups = [("shared_experts", SHARED_WIDTH)] + [(f"experts.{e}", EXPERT_WIDTH) for e in range(NUM_EXPERTS)]
        for name, neurons in groups:
            shapes[f"{prefix}mlp.{name}.gate_proj.weight"] = (neurons, width)
            shapes[f"{prefix}mlp.{name}.up_proj.weight"] = (neurons, width)
            shapes[f"{prefix}mlp.{name}.down_proj.weight"] = (width, neurons)
    return shapes | {"model.norm.weight": (width,)}


def _dtype(name: str) -> str:
    return "F32" if name.endswith("e_score_correction_bias") else "BF16"


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, np.ndarray]],
    on_bytes: Callable[[int, int], None],
) -> None:
    """Stream `tensors` (fp32, in the order of `shapes`) to a safetensors file, one in memory at a time.

    Args:
        on_bytes: called with (bytes written, total bytes) after each tensor.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[_dtype(name)]
        header[name] = {"dtype": _dtype(name), "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, shape), (found, values) in zip(shapes.items(), tensors, strict=True):
            assert (name, shape) == (found, values.shape), f"{found} {values.shape} where {name} {shape} was due"
            written += file.write(values.tobytes() if _dtype(name) == "F32" else to_bf16(values).tobytes())
            on_bytes(written, end)
        file.flush()
        os.fsync(file.fileno())
