"""Tiny seeded checkpoints of every family, written by transformers itself, and what transformers says about them.

Not tests and not ours: no line here imports moewe, so that the oracle stays independent (REF: eager attention, fp32).
Shapes: token ids are lists of int; logits [T, V] f32. Folders of `checkpoint` are shared by the process: copy to edit.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .fixtures_table import COMMON, DENSE_FIXTURES, FIXTURES, MOE_FIXTURES, VOCAB_SIZE

__all__ = ["DENSE_FIXTURES", "FIXTURES", "MOE_FIXTURES", "VOCAB_SIZE"]

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Families whose stacked experts are [E, in, out] in memory and in files.
TRANSPOSED = ("gpt_oss", "llama4_text")
# Tables and routers: rows that differ more than those of other matrices, so that choices are clear.
TALL = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "gate.wg.weight", "router.weight")


@cache
def scratch_root() -> Path:
    """Return this process's folder for checkpoints; it goes away with the process."""
    root = Path(tempfile.mkdtemp(prefix="moewe-fixtures-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def new_folder(name: str) -> Path:
    """Return a fresh, empty folder inside the scratch root."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch_root()))


def reference_config(name: str, **fields: Any) -> Any:
    """Return the transformers config of fixture `name` with other `fields`."""
    class_name, own = FIXTURES[name]
    return getattr(transformers, class_name)(**{**COMMON, **own, **fields})


def checkpoint(name: str, *, stacked: bool = False, shards: int = 1, dtype: str = "float32", **config: Any) -> Path:
    """Return the folder of fixture `name`; the same arguments give the same folder, so never edit it in place.

    Args:
        stacked: write experts as [E, 2F, D] and [E, D, F] instead of one tensor per expert.
        shards: number of weight files (with an index when more than one).
        dtype: of the stored weights.
        config: fields of the transformers config to override, e.g. `num_experts=10`.
    """
    return _checkpoint(name, stacked, shards, dtype, json.dumps(config, sort_keys=True))


@cache
def _checkpoint(name: str, stacked: bool, shards: int, dtype: str, overrides: str) -> Path:
    config = reference_config(name, **json.loads(overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager")
    randomize(model)
    folder = new_folder(name)
    model.save_pretrained(folder, save_original_format=not stacked)
    if shards > 1:
        rewrite_tensors(folder, lambda tensors: tensors, shards=shards)
    return folder


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter and buffer seeded values that matter: norms differ from 1, biases from 0.

    Matrices have about unit gain, so the logits of a row spread over several units and greedy choices are clear.
    """
    generator = torch.Generator().manual_seed(seed)
    transposed = model.config.model_type in TRANSPOSED
    for name, tensor in sorted(model.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif name.endswith(("e_score_correction_bias", *TALL)):
            value = 0.3 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif name.endswith("sinks"):
            value = noise
        else:
            fan_in = tensor.shape[-2 if transposed and ".experts." in name else -1]
            value = noise * fan_in**-0.5
        with torch.no_grad():
            tensor.copy_(value)


# -- what transformers says ------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def reference_model(path: Path) -> torch.nn.Module:
    """Return REF for the folder: transformers, eager attention, fp32; one mistake of it mended, see `mend_longrope`."""
    return _loaded(path, torch.float32)


def _loaded(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    if model.config.model_type == "phimoe":
        mend_longrope(model.model.rotary_emb)
    return model.eval()


def mend_longrope(rotary: torch.nn.Module) -> None:
    """Let a phimoe rotary embedding use the frequencies that it chose for the length.

    transformers 5.24 puts the long or the short ones into `inv_freq`, then computes the short ones again for every
    length (only the amplitude follows the length); the model's authors and transformers' phi3 use what was chosen.
    """
    if rotary.rope_type == "longrope":
        rotary.rope_init_fn = lambda config: (rotary.inv_freq, rotary.attention_scaling)


@torch.no_grad()
def reference_logits(path: Path, token_ids: Iterable[int]) -> torch.Tensor:
    """Return REF's logits at every position of one sequence, [T, V] f32."""
    return reference_model(path)(input_ids=torch.tensor([list(token_ids)])).logits[0].float().clone()


@torch.no_grad()
def half_precision_logits(path: Path, token_ids: Iterable[int]) -> torch.Tensor:
    """Return what transformers says in bf16 on the same weights, [T, V] f32."""
    return _loaded(path, torch.bfloat16)(input_ids=torch.tensor([list(token_ids)])).logits[0].float()


def reference_greedy(path: Path, prompt: Iterable[int], num_tokens: int) -> list[int]:
    """Return the `num_tokens` tokens that REF puts after `prompt`, end tokens taken like any other."""
    return [token for token, _ in _greedy(path, tuple(prompt), num_tokens)]


def reference_gaps(path: Path, prompt: Iterable[int], num_tokens: int) -> list[float]:
    """Return, for each token of `reference_greedy`, by how much its logit leads the second best."""
    return [gap for _, gap in _greedy(path, tuple(prompt), num_tokens)]


@lru_cache(maxsize=4096)
def _greedy(path: Path, prompt: tuple[int, ...], num_tokens: int) -> list[tuple[int, float]]:
    sequence, steps = list(prompt), []
    for _ in range(num_tokens):
        best = reference_logits(path, sequence)[-1].topk(2)
        steps.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
        sequence.append(steps[-1][0])
    return steps


def random_prompt(num_tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return seeded token ids that avoid the three special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()


# -- edits of a copy -------------------------------------------------------------------------------------------------


def copy_checkpoint(path: Path) -> Path:
    """Return a fresh copy of the folder, free to edit."""
    folder = new_folder(path.name)
    shutil.copytree(path, folder, dirs_exist_ok=True)
    return folder


def edit_json(path: Path, changes: Mapping[str, Any], remove: Iterable[str] = ()) -> Path:
    """Change and remove keys of a JSON file (made when missing); returns it."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    for key in remove:
        content.pop(key, None)
    path.write_text(json.dumps(content))
    return path


def edit_config(folder: Path, *, remove: Iterable[str] = (), **changes: Any) -> Path:
    """Change and remove fields of config.json; returns the folder."""
    edit_json(folder / "config.json", changes, remove)
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of every weight file of a clean folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], shards: int = 1
) -> Path:
    """Replace the weights by what `change` makes of their tensors, split over `shards` files; returns the folder."""
    tensors = change(read_tensors(folder))
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def drop_tensors(folder: Path, *names: str) -> Path:
    """Remove tensors from a folder with one weight file; returns the folder."""
    missing = set(names) - set(read_tensors(folder))
    if missing:
        raise KeyError(f"not in the checkpoint: {sorted(missing)}")
    return rewrite_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if n not in names})
