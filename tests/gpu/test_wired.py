"""The whole runtime with Triton kernels in its forward pass, in the interpreter, against transformers and torch.

What one kernel computes is tested beside this file, one by one. Here are scheduler, worker and decoder as a GPU has
them: chunks of prompts, single rows in fixed memory, rows that stand for nothing, blocks that are used again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moewe.models.config import MoEConfig
from moewe.models.decoder import Decoder
from moewe.models.forward_batch import ForwardBatch
from moewe.models.kernels.choice import choose_kernels, kernel_report
from moewe.moe.activation import SILU
from moewe.moe.routing import RoutingConfig
from moewe.native.gpu import Launch
from moewe.quant import KV_FORMATS
from moewe.runtime.options import layout_config
from tests.support.comparison import compare_runs, compare_with_reference
from tests.support.fixtures import FIXTURES, checkpoint, random_prompt
from tests.support.harness import Group, Outcome, greedy
from tests.support.no_host import HostWaits, no_host_looks
from tests.support.numerics import LOGITS_WITH_SCALED_KV, assert_near, assert_same
from tests.support.one_sequence import run_one
from tests.support.quantised import fp8_checkpoint, mxfp4_checkpoint
from tests.support.random_models import LAYERS, plain_config, random_weights
from tests.support.setups import Setup

SMALL = Setup(kernels="triton", block_size=4, num_blocks=6, max_num_seqs=4, max_chunk_tokens=4, max_model_len=16)
CPU = torch.device("cpu")
# Smaller than fixtures are, as the interpreter takes milliseconds for a program: plain; sinks, windows, biases and
# clamped experts; latents and groups.
SMALLER: dict[str, dict[str, Any]] = {
    "T-MIX": {"num_hidden_layers": 1, "intermediate_size": 32},
    "T-GOS": {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
        "intermediate_size": 32, "num_experts_per_tok": 2,
    },
    "T-DS3": {"num_hidden_layers": 2},
}  # fmt: skip
# Shared experts with a gate; norms after blocks and over all heads; LayerNorm, sparsemixer and long frequencies;
# weighed inputs, chunks and temperature; multipliers; a part of heads that turns; latents without a latent of queries.
OTHERS: dict[str, dict[str, Any]] = {
    "T-QW2": {},
    "T-FLX": {},
    "T-PHI": {"rope_parameters": FIXTURES["T-PHI"][1]["rope_parameters"] | {"original_max_position_embeddings": 8}},
    "T-LL4": {"attention_chunk_size": 8, "floor_scale": 4},
    "T-GRS": {},
    "T-GLM": {"num_hidden_layers": 2},
    "T-DS2": {"num_hidden_layers": 2},
    "T-MIS": {"num_hidden_layers": 2},
}


def wired(path: Path, lengths: tuple[int, ...], num_tokens: int, setup: Setup = SMALL, pad: int = 1) -> list[Outcome]:
    """Run prompts of some lengths; steps of single rows get as many rows as the next multiple of `pad`.

    On one rank whose experts kernels read, those steps must never make the host wait.
    """
    with Group(path, setup) as group:
        for worker in group.workers:
            worker._inputs.pad_to = lambda num_rows: -(-num_rows // pad) * pad
        seen: list[int] = []
        decoder = group.workers[0].decoder
        waits = any(not layer.runs_in_kernels for layer in decoder.moe_layers) or len(group.workers) > 1
        if not waits:
            guard(decoder, seen)
        outcomes = [
            group.submit(f"request-{i}", random_prompt(length, seed=length), greedy(num_tokens))
            for i, length in enumerate(lengths)
        ]
        group.run()
        assert seen or waits
    return outcomes


def guard(decoder: Decoder, seen: list[int]) -> None:
    """Refuse looks of the host in steps of single rows; how many rows such steps have is appended to `seen`."""
    compute = decoder.compute

    def guarded(batch: ForwardBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        if batch.fixed is None:
            return compute(batch, *args, **kwargs)
        seen.append(len(batch.input_ids))
        with no_host_looks():
            return compute(batch, *args, **kwargs)

    decoder.compute = guarded  # type: ignore[method-assign]


def test_chunks_and_single_rows_equal_transformers_and_the_host_never_waits() -> None:
    path = checkpoint("T-GOS", **SMALLER["T-GOS"])
    for outcome in wired(path, (5, 1), 2, pad=3):
        compare_with_reference(path, outcome)


def test_a_layer_of_a_decode_step_is_nine_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides torch's two products; the norm behind the last layer adds its experts up."""
    names: list[str] = []
    start = Launch._start
    monkeypatch.setattr(Launch, "_start", lambda launch: (names.append(launch.name), start(launch)))
    routing = RoutingConfig(num_experts=6, top_k=2, scoring="softmax", renormalize=True)
    moe = MoEConfig(routing=routing, expert_width=16, activation=SILU)
    config = plain_config(head_dim=16, qk_norm="head", moe=moe, moe_layers=(0, 1))
    run_one(config, random_weights(config), [1], chunk=1, kernels=choose_kernels(config, CPU, asked="triton"))
    attention = ["norm_kernel", "heads_kernel", "decode_kernel", "combine_splits_kernel"]
    experts = ["norm_kernel", "router_kernel", "route_permute_kernel", "streamed_kernel", "streamed_kernel"]
    assert names == [*attention, *experts] * 2 + ["norm_kernel"]


def test_what_runs_where_is_said() -> None:
    layers = [SimpleNamespace(runs_in_kernels=reads) for reads in (True, False)]
    wide, narrow = (plain_config(head_dim=width) for width in (16, 8))
    assert kernel_report(choose_kernels(wide, CPU), []) == ()
    invariant = choose_kernels(wide, CPU, asked="triton", batch_invariant=True)
    assert kernel_report(invariant, layers[:1]) == ("Triton runs norms, experts, attention (sm_90, batch-invariant)",)
    assert kernel_report(choose_kernels(narrow, CPU, asked="triton"), layers) == (
        "Triton runs norms, experts (sm_90)",
        "torch runs attention: heads of 8 elements, kernels need 16",
        "torch runs experts of 1 of 2 MoE layers: no kernel reads their format",
    )
    assert kernel_report(choose_kernels(wide, torch.device("cuda"), asked="torch"), []) == (
        "torch runs all of it: --kernels torch",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_layer_equals_transformers(name: str) -> None:
    """The third prompt gets blocks that another had."""
    path = checkpoint(name, **OTHERS[name])
    for outcome in wired(path, (11, 2, 5), 2, replace(SMALL, num_blocks=5, max_chunk_tokens=7), pad=2):
        compare_with_reference(path, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 blocks that no kernel reads", "mxfp4"])
def test_stored_weights_are_the_numbers_that_they_stand_for(name: str) -> None:
    """In experts, and in products of kernels with one matrix: latents, heads, dense layers and shared experts."""
    if name == "mxfp4":
        quantised, plain = mxfp4_checkpoint("T-GOS", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    else:
        block = (16, 32) if name == "fp8 blocks" else (48, 40)
        quantised, plain = fp8_checkpoint("T-DS3", block, num_hidden_layers=2)
    for outcome in wired(quantised, (5, 1), 2, pad=2):
        compare_with_reference(plain, outcome)


@pytest.mark.parametrize(
    ("topology", "exchange"),
    [
        ("EP2DP1[red=2]", "padded"),
        pytest.param("EP2DP1", "auto", marks=pytest.mark.slow),
        pytest.param("EP2DP1", "all_to_all", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(topology: str, exchange: str) -> None:
    """With rows that travel in fixed shapes, and with replicas of experts."""
    path = checkpoint("T-MIX", **SMALLER["T-MIX"])
    setup = replace(SMALL, topology=topology, exchange=exchange)
    compare_runs(wired(path, (3, 2), 2, setup), wired(path, (3, 2), 2, replace(SMALL, kernels="torch")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T-FLX", "T-GOS"])
def test_ranks_that_divide_heads_equal_one(name: str) -> None:
    path = checkpoint(name)
    for outcome in wired(path, (5, 2), 2, replace(SMALL, topology="EP2DP1[adp=1,atp=2]")):
        compare_with_reference(path, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_kv_of_one_byte_stays_near_fp32(name: str) -> None:
    path = checkpoint("T-MIX")
    exact = wired(path, (4,), 2, replace(SMALL, kernels="torch"))[0].logits_of_all()
    held = wired(path, (4,), 2, replace(SMALL, kv_cache_dtype=name))[0].logits_of_all()
    errors = (held - exact).pow(2).mean(-1).sqrt() / exact.pow(2).mean(-1).sqrt()
    assert 0 < errors.median() < LOGITS_WITH_SCALED_KV[name]


@pytest.mark.parametrize("head_dim", [16, 8])
def test_caps_windows_and_chunks_and_heads_too_narrow_for_kernels(head_dim: int) -> None:
    config = plain_config(
        head_dim=head_dim, attention_scale=head_dim**-0.5, score_cap=1.5, sinks=True, num_layers=3,
        layer_attention=LAYERS[:3], qk_norm="head",
    )  # fmt: skip
    weights, tokens = random_weights(config), list(range(1, 10))
    kernels = choose_kernels(config, CPU, asked="triton")
    assert [reason.split(":")[0] for reason in kernels.reasons] == (["attention"] if head_dim < 16 else [])
    ours = run_one(config, weights, tokens, chunk=4, kernels=kernels)
    assert_near(ours.logits, run_one(config, weights, tokens, chunk=4).logits, format="float32")


def test_the_watch_of_the_host_sees_what_torch_does() -> None:
    for look in (
        lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.cpu(), lambda x: bool(x.any()),
    ):  # fmt: skip
        with pytest.raises(HostWaits), no_host_looks():
            look(torch.ones(3))


# --- --batch-invariant ------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["T-MIX", "T-DS3"])
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    path = checkpoint(name, **SMALLER[name])
    setup = replace(SMALL, batch_invariant=True, dtype="bfloat16", num_blocks=12)
    alone = wired(path, (4,), 2, setup)[0]
    among = wired(path, (4, 1), 2, replace(setup, max_chunk_tokens=2), pad=4)[0]
    assert among.tokens == alone.tokens
    assert_same(among.logits_of_all(), alone.logits_of_all())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "cuda"}, "kernels='cuda' is not allowed; use auto, torch, triton"),
        ({"kernels": "torch", "device": "cuda", "batch_invariant": True}, "leave kernels out"),
        ({"batch_invariant": True}, "it is for device cuda"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layout_config({"model": "m", **options})


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_config({"model": "m", "kernels": "triton"}).parallel.kernels == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="a CPU has no Triton kernels; use auto, or device cuda"):
        layout_config({"model": "m", "kernels": "triton"})
