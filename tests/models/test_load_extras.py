"""What a checkpoint holds beside the model: parts that are not run, padding, other spellings of the same tensors."""

import logging

import pytest
import torch
import transformers

from moewe.models.config import ConfigError
from moewe.models.families import FAMILIES, load_config
from moewe.models.headers import check_weights
from moewe.models.loading import LoadOptions, load_weights
from moewe.models.tensor_names import NAMES
from tests.support.fixtures import (
    FIXTURES,
    checkpoint,
    copy_checkpoint,
    edit_config,
    new_folder,
    read_tensors,
    rewrite_tensors,
)
from tests.support.loaded import assert_same_as_reference


def load(path):
    return load_weights(path, load_config(path), LoadOptions(dtype=torch.float32))


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        check_weights(path, load_config(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_tensors(path, extra):
    return rewrite_tensors(copy_checkpoint(path), lambda tensors: tensors | extra)


def mtp_layer(path, layer, source):
    """Return a layer for multi-token prediction as DeepSeek and GLM store it: a copy of a layer, and what joins it."""
    old, new = f"model.layers.{source}.", f"model.layers.{layer}."
    copied = {n.replace(old, new): t for n, t in read_tensors(path).items() if n.startswith(old)}
    joint = {
        "eh_proj.weight": (64, 128),
        "enorm.weight": (64,),
        "hnorm.weight": (64,),
        "shared_head.norm.weight": (64,),
    }
    joint |= {"embed_tokens.weight": (512, 64), "shared_head.head.weight": (512, 64)}
    return copied | {new + name: torch.full(shape, torch.nan) for name, shape in joint.items()}


EXTRAS = {
    "T-DS3": lambda path: mtp_layer(path, 4, 3),
    "T-GLM": lambda path: mtp_layer(path, 3, 2),
    "T-GLL": lambda path: mtp_layer(path, 3, 2),
    "T-ERN": lambda path: {
        "model.mtp_block.0.self_attn.q_proj.weight": torch.zeros(64, 64),
        "model.mtp_emb_norm.0.weight": torch.zeros(64),
        "model.mtp_linear_proj.0.weight": torch.zeros(64, 128),
    },
    "T-LL4": lambda path: {
        "vision_model.model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8),
        "vision_model.class_embedding": torch.zeros(8),
        "multi_modal_projector.linear_1.weight": torch.zeros(64, 8),
    },
}


@pytest.mark.parametrize("name", EXTRAS)
def test_parts_that_are_not_run_are_left_alone_and_not_read(name, read_sizes, caplog):  # P-LOAD-09
    clean = checkpoint(name)
    extra = EXTRAS[name](clean)
    path = with_tensors(clean, extra)
    read_sizes.clear()
    with caplog.at_level(logging.INFO, "moewe"):
        report = load(path)
    assert report.bytes_read == sum(read_sizes)
    assert set(report.ignored) == extra.keys()
    assert report.bytes_held == load(clean).bytes_held
    (line,) = [message for message in caplog.messages if "nothing needs" in message]
    assert str(len(extra)) in line and len(line) < 400
    (file,) = path.glob("*.safetensors")
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert report.bytes_read == header_bytes + report.bytes_held
    assert_same_as_reference(report.weights, clean)


def test_layers_past_the_last_one_need_the_mark_of_multi_token_prediction():
    clean = checkpoint("T-DS3")
    layer = {n: t for n, t in mtp_layer(clean, 4, 3).items() if "eh_proj" not in n}
    assert "'model.layers.4." in refusal(with_tensors(clean, layer))
    assert "'model.layers.1.eh_proj.weight'" in refusal(
        with_tensors(clean, {"model.layers.1.eh_proj.weight": torch.zeros(64, 128)})
    )
    assert "'model.layers.2.eh_proj.weight'" in refusal(
        with_tensors(checkpoint("T-MIX"), {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)})
    )


@pytest.mark.parametrize("name", ["T-LL4", "T-PHI", "T-ERN"])
def test_padded_vocabularies_are_cut(name, caplog):
    clean = checkpoint(name)

    def pad(tensors):
        vocabulary = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")
        return {
            n: torch.cat([t, torch.full((37, *t.shape[1:]), torch.nan)]) if n in vocabulary else t
            for n, t in tensors.items()
        }

    path = rewrite_tensors(copy_checkpoint(clean), pad)
    with caplog.at_level(logging.INFO, "moewe"):
        weights = load(path).weights
    (line,) = caplog.messages
    assert "vocab_size" in line and "model.embed_tokens.weight" in line
    assert weights.embedding.shape == weights.head.shape == (512, 64)
    assert_same_as_reference(weights, clean)


def test_a_vocabulary_with_too_few_rows_is_refused():
    path = rewrite_tensors(
        copy_checkpoint(checkpoint("T-MIX")), lambda t: t | {"lm_head.weight": t["lm_head.weight"][:500]}
    )
    message = refusal(path)
    assert "500 rows" in message and "vocab_size = 512" in message
    other = rewrite_tensors(
        copy_checkpoint(checkpoint("T-MIX")), lambda t: t | {"lm_head.weight": torch.zeros(600, 32)}
    )
    assert "shape" in refusal(other)


def test_the_text_part_of_a_model_with_vision_has_a_prefix():
    clean = checkpoint("T-LL4")
    path = rewrite_tensors(
        copy_checkpoint(clean),
        lambda tensors: (
            {f"language_model.{n}": t for n, t in tensors.items()} | {"vision_model.class_embedding": torch.zeros(8)}
        ),
    )
    report = load(path)
    assert report.ignored == ("vision_model.class_embedding",)
    assert_same_as_reference(report.weights, clean)
    twice = with_tensors(path, {"model.norm.weight": torch.ones(64)})
    assert "both hold model.norm.weight" in refusal(twice)
    other = with_tensors(checkpoint("T-LLA"), {"language_model.model.norm.weight": torch.ones(64)})
    assert "'language_model.model.norm.weight'" in refusal(other)


def test_a_whole_llama4_as_transformers_saves_it():
    fields = {**vars(transformers.AutoConfig.from_pretrained(checkpoint("T-LL4")))}
    text = {k: v for k, v in fields.items() if not k.startswith("_")}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    vision |= {"vision_output_dim": 32, "image_size": 28, "patch_size": 14}
    vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = transformers.Llama4ForConditionalGeneration(config)
    folder = new_folder("llama4")
    model.save_pretrained(folder)
    report = load(folder)
    state = model.state_dict()
    assert torch.equal(report.weights.embedding, state["language_model.model.embed_tokens.weight"])
    experts = state["language_model.model.layers.1.feed_forward.experts.gate_up_proj"]
    assert torch.equal(report.weights.layers[1].moe.experts.w13, experts.mT)
    assert all(name.startswith(("vision_model.", "multi_modal_projector.")) for name in report.ignored)


MISSING = {
    "interleaved experts": ("T-GOS", "model.layers.1.mlp.experts.gate_up_proj"),
    "expert biases": ("T-GOS", "model.layers.1.mlp.experts.down_proj_bias"),
    "sinks": ("T-GOS", "model.layers.3.self_attn.sinks"),
    "a router bias": ("T-GOS", "model.layers.0.mlp.router.bias"),
    "latent keys and values": ("T-DS2", "model.layers.2.self_attn.kv_b_proj.weight"),
    "latent queries": ("T-DS3", "model.layers.2.self_attn.q_a_layernorm.weight"),
    "stacked experts": ("T-GRA", "model.layers.1.block_sparse_moe.input_linear.weight"),
    "a fused shared expert": ("T-GRS", "model.layers.1.shared_mlp.input_linear.weight"),
    "the bias of a norm": ("T-PHI", "model.layers.1.post_attention_layernorm.bias"),
    "the bias of the head": ("T-PHI", "lm_head.bias"),
    "an unsqueezed selection bias": ("T-ERN", "model.layers.2.mlp.moe_statics.e_score_correction_bias"),
    "a selection bias beside the gate": ("T-MM2", "model.layers.1.block_sparse_moe.e_score_correction_bias"),
    "a norm behind the FFN": ("T-FLX", "model.layers.1.post_feedforward_layernorm.weight"),
    "transposed experts": ("T-LL4", "model.layers.1.feed_forward.experts.down_proj"),
    "a router in its own module": ("T-HUN", "model.layers.1.mlp.gate.wg.weight"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_tensors_are_named_as_the_family_stores_them(case):
    fixture, name = MISSING[case]
    path = copy_checkpoint(checkpoint(fixture))
    assert name in read_tensors(path)
    rewrite_tensors(path, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    message = refusal(path)
    assert f"'{name}'" in message and message.startswith("weight files lack 1 tensor ")


TRANSPOSED = {
    "T-GOS": ("model.layers.0.mlp.experts.gate_up_proj", {"intermediate_size": 48}),
    "T-LL4": ("model.layers.1.feed_forward.experts.gate_up_proj", {"intermediate_size": 40}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_experts_the_other_way_round_are_refused(name):
    tensor, config = TRANSPOSED[name]
    path = rewrite_tensors(
        copy_checkpoint(checkpoint(name, **config)), lambda t: t | {tensor: t[tensor].mT.contiguous()}
    )
    assert "shape" in refusal(path)


def test_every_family_has_a_name_map_and_every_map_a_family():
    assert FAMILIES.keys() == NAMES.keys()
    assert {load_config(checkpoint(name)).family for name in FIXTURES} <= NAMES.keys()
    for names in NAMES.values():
        stored = [spelling.stored for spelling in names.spellings]
        assert len(set(stored)) == len(stored), sorted(name for name in stored if stored.count(name) > 1)


def test_a_changed_dtype_still_reads_every_layout():
    for name in ("T-GOS", "T-LL4", "T-DS2"):
        path = checkpoint(name, dtype="bfloat16")
        held = load_weights(path, load_config(path), LoadOptions(dtype=torch.float16)).weights
        layer = held.layers[1].moe.experts
        assert layer.w13.dtype == layer.w2.dtype == torch.float16
        same = load_weights(path, load_config(path), LoadOptions(dtype=torch.bfloat16)).weights
        assert torch.equal(same.layers[1].moe.experts.w13.half(), layer.w13)
    assert held.layers[0].latent.kv_b_k.dtype == torch.float16
    gos = checkpoint("T-GOS", dtype="bfloat16")
    weights = load_weights(
        edit_config(copy_checkpoint(gos)), load_config(gos), LoadOptions(dtype=torch.bfloat16)
    ).weights
    assert weights.layers[0].sinks.dtype == torch.float32
