"""Loading: bit by bit what transformers holds, only the bytes of a rank, and nothing left unfilled or unexplained."""

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moewe.models.config import ConfigError
from moewe.models.families import load_config
from moewe.models.headers import check_weights
from moewe.models.loading import LoadOptions, load_weights, prove_filled
from moewe.models.safetensors_file import SafetensorsFile
from moewe.moe.wide_ep.placement import ExpertPlacement, linear_placement
from tests.support.fixtures import (
    FIXTURES,
    MOE_FIXTURES,
    checkpoint,
    copy_checkpoint,
    drop_tensors,
    edit_config,
    read_tensors,
    rewrite_tensors,
)
from tests.support.loaded import assert_same_as_reference


def load(path, ranks=1, rank=0, dtype=torch.float32, on_progress=None, **options):
    config = load_config(path)
    experts = config.moe.routing.num_experts if config.moe else 0
    placement = linear_placement(len(config.moe_layers), experts, ranks)
    options = LoadOptions(placement=placement, rank=rank, dtype=dtype, **options)
    return load_weights(path, config, options, on_progress=on_progress)


def refusal(path):
    config = load_config(path)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    with pytest.raises(ConfigError) as early:
        check_weights(path, config)
    assert str(early.value) == message
    return message


PLAIN, STACKED, SHARDS = {}, {"stacked": True}, {"shards": 3}
LAYOUTS = [(name, PLAIN) for name in FIXTURES] + [(name, STACKED) for name in MOE_FIXTURES]
LAYOUTS += [(name, SHARDS) for name in ("T-LLA", "T-QW3", "T-DS3", "T-GOS")]  # a name map knows nothing of files


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain")
def test_weights_are_those_of_transformers(name, layout):
    path = checkpoint(name, **layout)
    report = load(path)
    assert_same_as_reference(report.weights, path)
    assert report.bytes_held == sum(tensor.nbytes for _, tensor in report.weights.tensors())
    assert report.ignored == ()


VARIANTS = {
    "tied": ("T-QW3", {"tie_word_embeddings": True}),
    "sparse step": ("T-QW2", {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "all biases": ("T-QW3", {"attention_bias": True}),
    "olmoe biases": ("T-OLM", {"attention_bias": True}),
    "llama biases": ("T-LLA", {"attention_bias": True, "head_dim": 32}),
    "no qkv bias": ("T-QW2", {"qkv_bias": False}),
    "glm with all": ("T-GLM-demo", {"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
    "ten experts": ("T-QW3", {"num_experts": 10}),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_weights_of_variants_are_those_of_transformers(case):
    name, config = VARIANTS[case]
    path = checkpoint(name, **config)
    assert_same_as_reference(load(path).weights, path)


@pytest.mark.parametrize(
    ("name", "stacked"),
    [(name, i % 2 == 1) for i, name in enumerate(MOE_FIXTURES)],  # that both hold the same is another test's affair
)
def test_each_rank_holds_its_experts(name, stacked):
    path = checkpoint(name, stacked=stacked)
    experts = load_config(path).moe.routing.num_experts
    for rank in (0, 3):
        local = np.array_split(np.arange(experts), 4)[rank]
        assert_same_as_reference(load(path, ranks=4, rank=rank).weights, path, local)


def test_uneven_slots_and_replicas_are_filled():
    path = checkpoint("T-QW3", num_experts=10)
    assert [len(load(path, 4, r).weights.layers[0].moe.experts.w2) for r in range(4)] == [3, 3, 2, 2]
    slots = np.array([[7, 0, 7, 3], [1, 1, 2, 9]], np.int32)
    placement = ExpertPlacement(
        physical_to_logical=slots,
        logical_to_physical=np.full((2, 10, 4), -1, np.int32),
        num_replicas=np.ones((2, 10), np.int32),
        slot_ranges=((0, 3), (3, 4)),
    )
    report = load_weights(path, load_config(path), LoadOptions(placement=placement, dtype=torch.float32))
    whole = load(path).weights
    for layer, experts in enumerate([[7, 0, 7], [1, 1, 2]]):
        assert torch.equal(report.weights.layers[layer].moe.experts.w13, whole.layers[layer].moe.experts.w13[experts])


WIDE = {
    "per-expert": ("T-QW3", False, {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16}),
    "stacked": ("T-QW3", True, {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16}),
    "interleaved": ("T-GOS", False, {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 16}),
    "transposed": ("T-LL4", False, {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16}),
}


@pytest.mark.parametrize("layout", WIDE)
def test_a_rank_reads_hardly_more_than_it_holds(layout, read_sizes):  # P-LOAD-05
    name, stacked, wide = WIDE[layout]
    path = checkpoint(name, stacked=stacked, shards=2, **wide)
    whole = load(path)
    for rank in range(4):
        read_sizes.clear()
        report = load(path, ranks=4, rank=rank)
        assert report.bytes_read == sum(read_sizes) <= 1.02 * report.bytes_held
        assert report.bytes_held < 0.4 * whole.bytes_held


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(stored, held):
    path = checkpoint("T-GLM-demo", dtype=stored)
    weights = load(path, dtype=held).weights
    tensors = read_tensors(path)
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert q.dtype == getattr(torch, stored)
    assert weights.layers[0].qkv.dtype == held and torch.equal(weights.layers[0].qkv[: len(q)], q.to(held))
    moe = weights.layers[1].moe
    assert moe.router.dtype == moe.selection_bias.dtype == torch.float32
    assert torch.equal(moe.router, tensors["model.layers.1.mlp.gate.weight"].float())
    up = tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert torch.equal(moe.experts.w13[5, 16:], up.to(held))
    assert load(checkpoint("T-MIX", dtype=stored), dtype=held).weights.layers[0].moe.router.dtype == held


def test_large_tensors_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr("moewe.models.reads.CHUNK_BYTES", 1000)
    path = checkpoint("T-MIX")
    assert_same_as_reference(load(path).weights, path)
    held = load(path, dtype=torch.bfloat16).weights
    assert torch.equal(held.head, read_tensors(path)["lm_head.weight"].bfloat16())


def test_progress_starts_at_zero_and_ends_at_the_total():
    told = []
    report = load(checkpoint("T-MIX"), on_progress=lambda done, total: told.append((done, total)))
    assert told[0] == (0, report.bytes_held) and told[-1] == (report.bytes_held, report.bytes_held)
    assert told == sorted(told)


def test_a_tied_head_is_the_embedding():  # P-LOAD-01
    path = checkpoint("T-QW3", tie_word_embeddings=True)
    assert "lm_head.weight" not in read_tensors(path)
    for rank in range(2):
        weights = load(path, ranks=2, rank=rank).weights
        assert weights.head is weights.embedding
        assert [name for name, _ in weights.tensors()].count("head") == 0


def test_a_head_beside_a_tied_embedding_is_ignored():
    path = copy_checkpoint(checkpoint("T-QW3", tie_word_embeddings=True))
    rewrite_tensors(path, lambda t: t | {"lm_head.weight": torch.zeros(512, 64)})
    report = load(path)
    assert report.weights.head is report.weights.embedding and report.ignored == ("lm_head.weight",)


def test_an_untied_head_must_be_there():  # P-LOAD-02
    message = refusal(drop_tensors(copy_checkpoint(checkpoint("T-QW3")), "lm_head.weight"))
    assert "lm_head.weight" in message and "tie_word_embeddings" in message and "supply the tensor" in message


def test_stray_files_change_nothing(caplog):  # P-LOAD-04
    clean = checkpoint("T-MIX", shards=4)
    path = copy_checkpoint(clean)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in read_tensors(clean).items()}
    save_file(zeros, path / "model.safetensors")
    save_file(zeros, path / "consolidated.safetensors")
    with caplog.at_level(logging.INFO, "moewe"):
        weights = load(path).weights
    assert_same_as_reference(weights, clean)
    (line,) = caplog.messages
    assert "consolidated.safetensors" in line and "model.safetensors" in line


MISSING = {
    "an expert's projection": ("T-MIX", "model.layers.1.block_sparse_moe.experts.7.w2.weight"),
    "a norm": ("T-LLA", "model.layers.0.input_layernorm.weight"),
    "a q norm": ("T-QW3", "model.layers.0.self_attn.q_norm.weight"),
    "a bias": ("T-QW2", "model.layers.1.self_attn.k_proj.bias"),
    "a selection bias": ("T-GLM-demo", "model.layers.1.mlp.gate.e_score_correction_bias"),
    "a shared expert": ("T-GLM-demo", "model.layers.1.mlp.shared_experts.up_proj.weight"),
    "a shared gate": ("T-QW2", "model.layers.0.mlp.shared_expert_gate.weight"),
    "the embedding": ("T-OLM", "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_tensors_are_named(case):
    fixture, name = MISSING[case]
    assert f"'{name}'" in refusal(drop_tensors(copy_checkpoint(checkpoint(fixture)), name))


UNKNOWN = {
    "a bias that the config does not call for": ("T-LLA", "model.layers.0.self_attn.q_proj.bias", (64,)),
    "one layer more": ("T-MIX", "model.layers.2.input_layernorm.weight", (64,)),
    "one expert more": ("T-QW3", "model.layers.0.mlp.experts.8.up_proj.weight", (48, 64)),
    "a scale": ("T-LLA", "model.layers.0.self_attn.q_proj.weight_scale", (1,)),
    "another model": ("T-MIX", "transformer.h.0.attn.weight", (4, 4)),
    "experts in a dense model": ("T-LLA", "model.layers.0.mlp.experts.gate_up_proj", (8, 192, 64)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_tensors_are_refused(case):  # P-LOAD-05
    fixture, name, shape = UNKNOWN[case]
    path = rewrite_tensors(copy_checkpoint(checkpoint(fixture)), lambda t: t | {name: torch.zeros(shape)})
    assert f"'{name}'" in refusal(path)


def test_rotary_frequencies_of_old_checkpoints_are_ignored():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = rewrite_tensors(copy_checkpoint(checkpoint("T-LLA")), lambda t: t | {name: torch.zeros(8)})
    assert load(path).ignored == (name,)


def test_experts_given_twice_are_refused():
    stacked = read_tensors(checkpoint("T-QW3", stacked=True))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    path = rewrite_tensors(copy_checkpoint(checkpoint("T-QW3")), lambda t: t | {name: stacked[name]})
    message = refusal(path)
    assert name in message and "model.layers.1.mlp.experts.0.gate_proj.weight" in message


def test_layers_may_differ_in_layout():
    stacked = read_tensors(checkpoint("T-QW3", stacked=True))
    path = checkpoint("T-QW3")

    def mix(tensors):
        first = "model.layers.0.mlp.experts."
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(first)}
        return rest | {name: tensor for name, tensor in stacked.items() if name.startswith(first)}

    assert_same_as_reference(load(rewrite_tensors(copy_checkpoint(path), mix)).weights, path)


@pytest.mark.parametrize("stacked", [False, True], ids=["per-expert", "stacked"])
def test_other_shapes_than_the_config_calls_for_are_refused(stacked):
    path = copy_checkpoint(checkpoint("T-MIX", stacked=stacked))
    assert "shape" in refusal(edit_config(path, intermediate_size=80))
    transposed = rewrite_tensors(
        copy_checkpoint(checkpoint("T-MIX", stacked=stacked)),
        lambda t: {name: x.mT.contiguous() if x.dim() == 3 or ".w2." in name else x for name, x in t.items()},
    )
    assert "shape" in refusal(transposed)


def test_number_formats_that_cannot_be_loaded_are_named():
    def to_double(tensors):
        return tensors | {"model.norm.weight": tensors["model.norm.weight"].double()}

    message = refusal(rewrite_tensors(copy_checkpoint(checkpoint("T-MIX")), to_double))
    assert "F64" in message and "bfloat16" in message


def test_a_failing_read_ends_loading(monkeypatch):
    def fail(self, buffer, offset):
        raise ConfigError("weight file 'x' cannot be read: Input/output error")

    path = checkpoint("T-MIX")
    config = load_config(path)
    with monkeypatch.context() as patch:
        real = SafetensorsFile.read_into
        patch.setattr(SafetensorsFile, "read_into", lambda s, b, o: (real if o <= 8 else fail)(s, b, o))
        with pytest.raises(ConfigError, match="Input/output error"):
            load_weights(path, config, LoadOptions(dtype=torch.float32))


def test_a_gap_or_overlap_would_be_noticed():
    weights = load(checkpoint("T-MIX")).weights
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for _, t in weights.tensors()]
    prove_filled(weights, spans)
    begin, end = spans[3]
    for wrong in ([], [(begin, end - 4)], [(begin + 4, end)], [(begin, end), (begin, end)], [(begin, end), (1, 2)]):
        with pytest.raises(RuntimeError):
            prove_filled(weights, spans[:3] + wrong + spans[4:])
    prove_filled(weights, [*spans[:3], (begin, begin + 8), (begin + 8, end), *spans[4:]])


@pytest.mark.parametrize("name", FIXTURES)
def test_dummy_weights_need_only_a_config(name, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint(name) / "config.json").read_bytes())
    report = load(tmp_path, dtype=torch.bfloat16, dummy=True)
    real = load(checkpoint(name), dtype=torch.bfloat16)
    assert report.bytes_read == 0 and report.bytes_held == real.bytes_held
    described = [(path, tensor.shape, tensor.dtype) for path, tensor in report.weights.tensors()]
    assert described == [(path, tensor.shape, tensor.dtype) for path, tensor in real.weights.tensors()]
    assert all(tensor.isfinite().all() for _, tensor in report.weights.tensors())
    assert 0.015 < report.weights.embedding.float().std() < 0.025


def test_dummy_weights_follow_their_seed():
    first, again, other = (load(checkpoint("T-QW3"), dummy=True, seed=seed).weights for seed in (3, 3, 4))
    assert torch.equal(again.embedding, first.embedding)
    assert not torch.equal(other.embedding, first.embedding)


def test_dummy_experts_do_not_depend_on_the_topology():
    path = checkpoint("T-QW3")
    whole = load(path, dummy=True).weights
    parts = [load(path, ranks=4, rank=rank, dummy=True).weights for rank in range(4)]
    for layer in range(2):
        w13 = torch.cat([part.layers[layer].moe.experts.w13 for part in parts])
        assert torch.equal(w13, whole.layers[layer].moe.experts.w13)
        assert all(torch.equal(part.layers[layer].qkv, whole.layers[layer].qkv) for part in parts)
    experts = whole.layers[0].moe.experts.w13
    assert not torch.equal(experts[0], experts[1])
