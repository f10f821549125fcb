"""Stage 1 of gpu_check, products of all rows with one matrix: stored weights, and fixed tiles for every dtype.

Experts are in gpu_check_values.py. A case calls what the forward pass calls; its launches, made apart over the same
inputs, are what is compiled beforehand. Letters: T rows, H heads, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.gpu_check_inputs import Place, random_experts, shapes_of
from benchmarks.gpu_check_values import Case, Errors, Made, near
from moewe.moe.kernels.linear import head_launches, head_linear, linear, linear_launches, logits
from moewe.native.gpu import GpuKernels, GpuTarget, Launch
from moewe.quant import Matrix, QuantTensor
from tests.support.poisoned import poisoned_memory

# Sums of thousands in fp32, one after the other, stray by sqrt(K / 2) halves of the last place.
_FP32_SUMS = ("float32",) * 3
# Format, model, fixed tiles.
_STORED = (
    ("fp8 128x128", "qwen3-30b-a3b", False),
    ("int4 32", "qwen3-30b-a3b", False),
    ("int8 channel", "qwen3-30b-a3b", False),
    ("fp8 channel", "glm-4.5", False),
    ("mxfp4", "gpt-oss-120b", False),
    ("int4 128", "deepseek-v3", False),
    ("fp8 128x128", "deepseek-v3", True),
    ("int4 32", "qwen3-30b-a3b", True),
)


def _launches(found: tuple[list[Launch], torch.Tensor] | None) -> Sequence[Launch]:
    assert found is not None, "a format that no kernel reads"
    return found[0]


def _dense64(weight: Matrix) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor | QuantTensor)
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)).double()


def _stored(model: str, format_name: str, fixed: bool, rows: int, place: Place, target: GpuTarget) -> Made:
    """A matrix of two parts with scales of their own, as those of Q, K and V are fused, and one of one part."""
    shapes = shapes_of(place.config(model), [format_name], num_experts=1)
    kernels = GpuKernels(target=target, batch_invariant=fixed)
    experts = random_experts(shapes, format_name, place)
    cases = []
    for stack in (experts.w13, experts.w2):
        assert isinstance(stack, QuantTensor)
        weight = stack.select(0)
        x, bias = place.randn(rows, weight.shape[1]), place.randn(weight.shape[0])
        cases.append((x, weight, bias))

    def compare() -> Errors:
        errors = []
        for x, weight, bias in cases:
            with poisoned_memory():
                out = linear(x, weight, bias, kernels)
            errors.append(near(out, x.double() @ _dense64(weight).T + bias.double(), "bfloat16"))
        return max(errors, key=lambda error: error["max_error"])

    return Made(launches=[launch for case in cases for launch in _launches(linear_launches(*case, kernels))],
                compare=compare)  # fmt: skip


def _plain(dtype: torch.dtype, rows: int, place: Place, target: GpuTarget) -> Made:
    """The router in fp32, projections in bf16, both in fixed tiles."""
    shapes = shapes_of(place.config("qwen3-30b-a3b"), [])
    width = shapes.width
    outputs = shapes.routing.num_experts if dtype == torch.float32 else 3 * width
    # Numbers of all bits of the dtype: a product in fewer, as tensor cores would do of fp32, shall show.
    weight = (torch.randn(outputs, width, device=place.device) * width**-0.5).to(dtype)
    x, bias = (torch.randn(*size, device=place.device).to(dtype) for size in ((rows, width), (outputs,)))
    kernels = GpuKernels(target=target, batch_invariant=True)

    def compare() -> Errors:
        with poisoned_memory():
            out, alone = linear(x, weight, bias, kernels), linear(x[:1], weight, bias, kernels)
        if not bool((out[:1] == alone).all()):
            raise AssertionError("a row has other bits by itself")
        expected = x.double() @ weight.double().T + bias.double()
        return near(out, expected, *(_FP32_SUMS if dtype == torch.float32 else ("bfloat16",)))

    return Made(launches=_launches(linear_launches(x, weight, bias, kernels)), compare=compare)


def _heads(rows: int, place: Place, target: GpuTarget) -> Made:
    """Queries into latents, a product a head."""
    config = place.config("deepseek-v3")
    assert config.latent is not None
    heads, inputs, outputs = config.num_heads, config.latent.nope_dim, config.latent.kv_rank
    weight, x = place.randn(heads, outputs, inputs, scale=inputs**-0.5), place.randn(rows, heads, inputs)
    kernels = GpuKernels(target=target, batch_invariant=True)

    def compare() -> Errors:
        with poisoned_memory():
            out = head_linear(x, weight, kernels)
        return near(out, torch.einsum("tlk,lnk->tln", x.double(), weight.double()), "bfloat16")

    return Made(launches=head_launches(x, weight, kernels)[0], compare=compare)


def _logits(rows: int, place: Place, target: GpuTarget) -> Made:
    """The head in fixed tiles; its products come out in bf16 before they are fp32."""
    config = place.config("qwen3-30b-a3b")
    width = config.hidden_size
    x, head = place.randn(rows, width), place.randn(config.vocab_size, width, scale=width**-0.5)
    kernels = GpuKernels(target=target, batch_invariant=True)

    def compare() -> Errors:
        with poisoned_memory():
            out = logits(x, head, None, kernels)
        if out.dtype != torch.float32:
            raise AssertionError(f"logits are {out.dtype}")
        return near(out, x.double() @ head.double().T, "bfloat16")

    return Made(launches=_launches(linear_launches(x, head, None, kernels)), compare=compare)


def linear_cases(*, small: bool) -> Iterator[Case]:
    """Yield the cases of this file."""
    for format_name, model, fixed in _STORED:
        for rows in (5,) if small else (1, 300):
            name = f"linear {format_name}, {model}, {rows} rows{', batch-invariant' if fixed else ''}"
            yield Case(name=name, rank=1, make=partial(_stored, model, format_name, fixed, rows))
    many = 5 if small else 300
    for dtype in (torch.float32, torch.bfloat16):
        name = f"linear {str(dtype).removeprefix('torch.')}, batch-invariant"
        yield Case(name=name, rank=1, make=partial(_plain, dtype, many))
    yield Case(name="linear of each head, batch-invariant", rank=1, make=partial(_heads, many))
    yield Case(name="logits, batch-invariant", rank=1, make=partial(_logits, 3 if small else 64))
