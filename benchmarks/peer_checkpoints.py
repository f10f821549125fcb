"""Convert bench-1b to what each peer reads: GGUF for llama.cpp (bf16, Q8_0, Q4_0), OpenVINO's own format (int8, int4).

Not a benchmark and no converter of models in general: only Qwen3-MoE without a tokenizer, as bench_1b.py makes it.
peers.py calls `ensure`; a step that needs a peer's library runs this file with that peer's Python, so only the standard
library is imported at the top. A file that is only half written never has its final name. One step by hand:

    LLAMACPP_PYTHON benchmarks/peer_checkpoints.py Q4_0 bf16.gguf Q4_0.gguf
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# What llama.cpp calls the formats of the weights.
LLAMACPP = {"bf16": "bf16", "int8": "Q8_0", "int4": "Q4_0"}
OPENVINO_GROUP = 128


class NotMade(Exception):
    """A checkpoint that could not be converted; the text is one line that says why."""


def ensure(runtime: str, weights: str, checkpoint: Path, folder: Path, python: str) -> Path:
    """Return the checkpoint that `runtime` reads; make it first where it is missing.

    Args:
        runtime: a key of `peer_worker.RUNTIMES`.
        weights: bf16, int8 or int4.
        checkpoint: bench-1b as safetensors.
        folder: where converted checkpoints lie.
        python: the interpreter that has the runtime's library.
    """
    if runtime == "llamacpp":
        kind = LLAMACPP[weights]
        plain = folder / "bf16.gguf"
        _make("bf16", checkpoint, plain, sys.executable)
        return _make(kind, plain, folder / f"{kind}.gguf", python)
    if runtime == "openvino":
        return _make(weights, checkpoint, folder / f"openvino-{weights}", python)
    return checkpoint


def _make(kind: str, source: Path, target: Path, python: str) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    print(f"making {target} ...", flush=True)
    script = str(Path(__file__).resolve())
    done = subprocess.run(
        [python, "-P", script, kind, str(source), str(part)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["nothing"]
        raise NotMade(f"{target.name} could not be made: exit code {done.returncode}, its last line: {said[-1]}")
    return part.rename(target)


def write_gguf(source: Path, target: Path) -> None:
    """Write the safetensors of `source` as one GGUF file: matrices bf16 as they are, norms and routers fp32.

    The experts of a layer become one tensor [experts, out, in]; tensors are written one by one, never all in memory.
    """
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    config = json.loads((source / "config.json").read_text())
    files = [safe_open(str(path), "pt") for path in sorted(source.glob("*.safetensors"))]
    where: dict[str, Any] = {}
    for file in files:
        where |= dict.fromkeys(file.keys(), file)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    experts = config.get("num_experts") or config["num_local_experts"]

    tensors: dict[str, list[str]] = {}  # name in GGUF -> what it is stacked from
    for name in where:
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, projection, _ = tail.split(".")
            if number == "0":
                stacked = names.get_name(f"{head}.experts.{projection}")
                tensors[f"{stacked}.weight"] = [f"{head}.experts.{e}.{projection}.weight" for e in range(experts)]
        else:
            tensors[names.get_name(name, try_suffixes=(".weight",))] = [name]

    writer = gguf.GGUFWriter(target, "qwen3moe")
    _describe(writer, config, experts)

    def single(name: str) -> bool:
        return "norm" in name or "ffn_gate_inp" in name

    for name, parts in tensors.items():
        shape = where[parts[0]].get_slice(parts[0]).get_shape()
        shape = [len(parts), *shape] if len(parts) > 1 else shape
        size = int(np.prod(shape))
        if single(name):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * size)
        else:  # bytes: numpy has no bf16
            raw = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, [*shape[:-1], 2 * shape[-1]], np.dtype(np.uint8), 2 * size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts in tensors.items():
        values = [where[part].get_tensor(part) for part in parts]
        tensor = torch.stack(values) if len(values) > 1 else values[0]
        writer.write_tensor_data((tensor.float() if single(name) else tensor.view(torch.uint8)).numpy())
    writer.close()


def _describe(writer: Any, config: dict[str, Any], experts: int) -> None:
    import gguf

    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def quantise_gguf(source: Path, target: Path, kind: str) -> None:
    """Let llama.cpp quantise a GGUF file; `kind` is Q8_0 or Q4_0. Its defaults decide which tensors stay finer."""
    import ctypes

    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama_model_quantize returned {code}")


def export_openvino(source: Path, target: Path, kind: str) -> None:
    """Let optimum-intel export the checkpoint with weights in int8 (each output channel) or int4 (groups)."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options = {"bits": 8} if kind == "int8" else {"bits": 4, "group_size": OPENVINO_GROUP, "ratio": 1.0}
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, quantization_config=OVWeightQuantizationConfig(**options)
    )
    model.save_pretrained(target)


def main() -> None:
    kind, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if kind == "bf16":
        write_gguf(source, target)
    elif kind in LLAMACPP.values():
        quantise_gguf(source, target, kind)
    else:
        export_openvino(source, target, kind)


if __name__ == "__main__":
    main()
