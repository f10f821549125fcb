"""The whole runtime with Triton kernels in its forward pass, in the interpreter, against transformers and torch.

What one kernel computes is tested beside this file, one by one. Here are scheduler, worker and decoder as a GPU has
them: chunks of prompts, single rows in fixed memory, rows that stand for nothing, blocks that are used again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moewe.models.decoder import Decoder
from moewe.models.forward_batch import ForwardBatch
from moewe.models.kernels.choice import choose_kernels
from moewe.quant import KV_FORMATS
from moewe.runtime.options import layout_config
from tests.support.comparison import compare_runs, compare_with_reference
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.harness import Group, Outcome, greedy
from tests.support.no_host import HostWaits, no_host_looks
from tests.support.numerics import LOGITS_WITH_SCALED_KV, assert_near, assert_same
from tests.support.one_sequence import run_one
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
# weighed inputs, chunks and temperature; multipliers; a part of heads that turns; latents with and without a latent of
# queries.
OTHERS = ("T-QW2", "T-FLX", "T-PHI", "T-LL4", "T-GRS", "T-GLM", "T-DS2", "T-GOS", "T-DS3", "T-MIS")


def wired(path: Path, lengths: tuple[int, ...], num_tokens: int, setup: Setup = SMALL, pad: int = 1) -> list[Outcome]:
    """Run prompts of some lengths; steps of single rows get as many rows as the next multiple of `pad`.

    On one rank those steps must never make the host wait.
    """
    with Group(path, setup) as group:
        for worker in group.workers:
            worker._inputs.pad_to = lambda num_rows: -(-num_rows // pad) * pad
        guarded: list[int] = []
        if setup.kernels == "triton" and len(group.workers) == 1:
            guard(group.workers[0].decoder, guarded)
        outcomes = [
            group.submit(f"request-{i}", random_prompt(length, seed=length), greedy(num_tokens))
            for i, length in enumerate(lengths)
        ]
        group.run()
        assert guarded or len(group.workers) > 1 or setup.kernels != "triton"
    return outcomes


def guard(decoder: Decoder, seen: list[int]) -> None:
    """Refuse looks of the host in every step of single rows; the rows of such steps are appended to `seen`."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_layer_equals_transformers(name: str) -> None:
    """Sixteen positions and more; the third prompt gets blocks that another had."""
    path = checkpoint(name)
    setup = replace(SMALL, num_blocks=13, max_chunk_tokens=7, max_model_len=48, max_num_seqs=3)
    for outcome in wired(path, (19, 2, 11), 4, setup, pad=3):
        compare_with_reference(path, outcome)


@pytest.mark.slow
def test_long_frequencies_reach_padded_rows() -> None:
    path = checkpoint("T-PHI")
    setup = replace(SMALL, num_blocks=40, max_chunk_tokens=None, max_model_len=60)
    for outcome in wired(path, (41,), 2, setup, pad=4):
        compare_with_reference(path, outcome)


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
    setup = replace(SMALL, topology="EP2DP1[adp=1,atp=2]", num_blocks=12, max_model_len=32)
    for outcome in wired(path, (9, 3), 3, setup):
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
