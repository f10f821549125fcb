"""Stage 2 of gpu_check, products of all rows with one matrix: those of stored weights, and what fixed tiles cost.

Plain weights are torch's, unless `--batch-invariant` is set: then the same product runs in fixed tiles, and both stand
in a line. Shapes are Qwen3-30B-A3B's. Letters: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_check_device import Repetitions
from benchmarks.gpu_check_inputs import Place, random_matrix, shapes_of
from benchmarks.gpu_check_speed import Calls, Speed
from moewe.models.published import published_config
from moewe.moe.kernels.linear import linear_launches
from moewe.native.gpu import GpuKernels, GpuTarget, Launch
from moewe.quant import Matrix, QuantTensor
from moewe.topologies.kernel_work import Work

MODEL = "qwen3-30b-a3b"
_TOKENS = (1, 64, 4096)
_STORED = ("fp8 128x128", "int4 32")
_COPIES_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix [N, K] as the model holds it."""

    name: str
    outputs: int
    inputs: int
    format: str  # `fp32`, or one of experts

    def like(self) -> Matrix:
        """Return it without memory."""
        if self.format == "fp32":
            return torch.empty(self.outputs, self.inputs, device="meta")
        shapes = shapes_of(published_config(MODEL), [self.format], num_experts=1)
        stack = replace(shapes, width=self.outputs, ffn_width=self.inputs).experts(self.format).w2
        return stack.select(0) if isinstance(stack, QuantTensor) else stack[0]

    def made(self, place: Place, number: int) -> list[Matrix]:
        """Return up to `number` of them, so many that no cache holds all."""
        like = self.like()
        if place.holds_nothing:
            return [like]
        most = max(2, int(_COPIES_BYTES / _bytes(like)))
        return [_filled(like, place) for _ in range(min(number, most))]

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""
        return torch.float32 if self.format == "fp32" else torch.bfloat16

    def work(self, tokens: int) -> Work:
        """Return the least that a product does."""
        rows = tokens * (self.inputs + self.outputs) * self.dtype.itemsize
        return Work(bytes=_bytes(self.like()) + rows, flops=2.0 * tokens * self.inputs * self.outputs)


def _bytes(matrix: Matrix) -> int:
    return matrix.num_bytes if isinstance(matrix, QuantTensor) else matrix.nbytes


def _filled(like: Matrix, place: Place) -> Matrix:
    """A matrix with random numbers; `random_matrix` makes stacks."""
    if isinstance(like, torch.Tensor):
        return random_matrix(like[None], place)[0]
    assert isinstance(like, QuantTensor)
    parts = {name: getattr(like, name) for name in ("data", "scales", "zeros")}
    stack = {name: None if part is None else part[None] for name, part in parts.items()}
    made = random_matrix(replace(like, shape=(1, *like.shape), **stack), place)
    assert isinstance(made, QuantTensor)
    return made.select(0)


def _rows(product: Product, tokens: int, place: Place) -> torch.Tensor:
    return place.randn(tokens, product.inputs).to(product.dtype)


def _launches(product: Product, tokens: int, fixed: bool, place: Place, target: GpuTarget, number: int) -> Repetitions:
    weights, kernels = product.made(place, number), GpuKernels(target=target, batch_invariant=fixed)
    made = []
    for i in range(number):
        found = linear_launches(_rows(product, tokens, place), weights[i % len(weights)], None, kernels)
        assert found is not None
        made.append(found[0])
    return made


def _torch(product: Product, tokens: int, place: Place, number: int) -> Calls:
    weights = product.made(place, number)
    return [partial(F.linear, _rows(product, tokens, place), weights[i % len(weights)]) for i in range(number)]


def products() -> Iterator[Product]:
    """Yield the matrices."""
    config = published_config(MODEL)
    assert config.moe is not None
    width, heads = config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    yield Product(name="router", outputs=config.moe.routing.num_experts, inputs=width, format="fp32")
    for format_name in ("bf16", *_STORED):
        yield Product(name="qkv", outputs=heads, inputs=width, format=format_name)
    yield Product(name="head", outputs=config.vocab_size, inputs=width, format="bf16")


def fixed_launches(target: GpuTarget) -> Iterator[Launch]:
    """Yield what all these products launch in fixed tiles, over tensors without memory."""
    for product in products():
        for launches in _launches(product, 2, True, Place(device=torch.device("meta")), target, 1):
            yield from launches


def linear_speeds() -> Iterator[Speed]:
    """Yield what is timed."""
    for product in products():
        is_stored = product.format in _STORED
        for tokens in _TOKENS if product.name != "head" else (1, 64):
            build, form = partial(_launches, product, tokens), product.format
            if not is_stored:
                form += " batch-invariant"
            invariant: Callable[[Place, GpuTarget, int], Repetitions] = partial(build, True)
            yield Speed(
                name=f"linear {form}, {product.name}, {tokens} tokens",
                rank=7,
                work=product.work(tokens),
                build=partial(build, False) if is_stored else invariant,
                baseline=None if is_stored else partial(_torch, product, tokens),
                invariant=invariant if is_stored else None,
            )
