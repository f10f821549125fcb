"""Tests of the demo checkpoint itself: files, tokenizer, weights, and what stock transformers makes of it.

Not its building (test_demo.py) and not moewe's own decoder on it (tests/e2e).
T tokens, E 16 experts, D 576; perplexity over held-out conversations.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from moewe.models.demo import checkpoint, ensure_demo_checkpoint
from moewe.models.demo.dense_source import to_rotate_half
from moewe.models.demo.weights import load_carving, to_bf16, write_safetensors

CONVERSATIONS = Path(checkpoint.__file__).with_name("conversations.json")
WEIGHTS_SHA256 = "5fdcb2df17a91491f27354b1601a4b8fd33130364f28a1edb0505747bac3afa3"


@pytest.fixture(scope="module")
def demo() -> Path:
    """The real demo checkpoint, from the cache or built now."""
    return ensure_demo_checkpoint()


@pytest.fixture(scope="module")
def model(demo: Path) -> Any:
    """The demo as stock transformers loads it, in bf16, with what it missed."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo, output_loading_info=True)


def test_files_are_the_expected_ones(demo: Path) -> None:
    marker = json.loads((demo / "moewe-demo.json").read_text())
    assert marker["sha256"]["model.safetensors"] == WEIGHTS_SHA256
    assert "Apache License" in (demo / "LICENSE").read_text()
    assert "SmolLM2-135M-Instruct by Hugging Face" in (demo / "README.md").read_text()
    config = json.loads((demo / "config.json").read_text())
    assert (config["n_routed_experts"], config["num_experts_per_tok"], config["n_shared_experts"]) == (16, 12, 8)
    assert json.loads((demo / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_tokenizer_round_trips_and_splits_digits(demo: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    text = "Hello  wörld 12345, don't\n\n\tdef f(x): return x**2 🙂 日本"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.id_to_token(t) for t in tokenizer.encode(" 2026").ids] == ["Ġ", "2", "0", "2", "6"]
    assert tokenizer.encode("The capital of France is").tokens == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[::4] == [1, 2]
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == text


def test_chat_template_is_the_source_model_s(demo: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>system\n") and text.endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text).input_ids == Tokenizer.from_file(str(demo / "tokenizer.json")).encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_carving_is_a_permutation_and_small(demo: Path) -> None:
    carving = load_carving()
    assert carving.neuron_order.shape == (30, 1536) and carving.router.shape == (30, 16, 576)
    assert (np.sort(carving.neuron_order, axis=1) == np.arange(1536)).all()
    assert np.isfinite(carving.router.astype(np.float32)).all()
    assert Path(checkpoint.CARVING_FILE).stat().st_size < 1_000_000
    with safe_open(demo / "model.safetensors", "pt") as file:
        router = file.get_tensor("model.layers.7.mlp.gate.weight")
        bias = file.get_tensor("model.layers.7.mlp.gate.e_score_correction_bias")
    assert torch.equal(router, torch.from_numpy(carving.router[7]).to(torch.bfloat16))
    assert bias.dtype == torch.float32 and not bias.any()


def test_rotary_rows_are_undone_per_head() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert to_rotate_half(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_bf16_rounds_as_torch_does(tmp_path: Path) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(1e-3)
    values[:4] = torch.tensor([1.00390625, 1.01171875, 0.0, -0.0])  # two ties, one to each side; both zeros
    name = "layer.weight"
    tensors = iter([(name, values.numpy())])
    write_safetensors(tmp_path / "one.safetensors", {name: (1000,)}, tensors, lambda done, total: None)
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(name), values.to(torch.bfloat16))
    assert to_bf16(np.float32([1.0])).tolist() == [0x3F80]


def test_transformers_loads_every_tensor_and_answers(demo: Path, model: Any) -> None:
    from transformers import AutoTokenizer

    loaded, info = model
    assert type(loaded).__name__ == "Glm4MoeForCausalLM"
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(demo)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = loaded.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@torch.inference_mode()
def test_experts_are_all_used_with_weights_near_one(demo: Path, model: Any) -> None:
    loaded, _ = model
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in loaded.model.layers]
    hooks = [
        block.mlp.gate.register_forward_hook(lambda _, args, out, i=i: seen[i].append(out[1:]))
        for i, block in enumerate(loaded.model.layers)
    ]
    loss = held_out_loss(loaded, demo)
    for hook in hooks:
        hook.remove()
    for layer in seen:
        weights, chosen = (torch.cat(parts) for parts in zip(*layer))  # [T, K] both
        assert torch.allclose(weights.sum(1), torch.tensor(12.0), atol=1e-3)
        assert (weights - 1).abs().mean() < 0.06 and weights.min() > 0.6 and weights.max() < 1.6
        share = torch.bincount(chosen.flatten(), minlength=16) / len(chosen)
        assert share.min() > 0.1, "a dead expert"
    assert math.exp(loss) < 45.0


def held_out_loss(loaded: Any, demo: Path) -> float:
    """Mean negative log-likelihood of a token over six held-out conversations."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    total, count = 0.0, 0
    for row in json.loads(CONVERSATIONS.read_text())["held_out"][:6]:
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
        total += loaded(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count
