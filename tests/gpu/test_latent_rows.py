"""`triton_latent_rows` against the torch steps of models/latent.py, bit by bit where sums and rotations are exact."""

from __future__ import annotations

import pytest
import torch

from moewe.attention.kernels.latent import LatentSteps, triton_latent_rows
from moewe.kvcache import CacheGroup
from moewe.kvcache.storage import KVStorage
from moewe.models.config import RotaryConfig
from moewe.models.layers import rms_norm
from moewe.models.rotary import Angles, Rotary
from moewe.native.gpu import TARGETS
from moewe.quant import FORMATS, KV_FORMATS
from tests.gpu.test_heads import BLOCK_SIZE, BLOCKS, LAYER, assert_stored
from tests.support.numerics import assert_same


def storage_of(width: int, rank: int, kv_format: str) -> KVStorage:
    group = CacheGroup(
        name="g", kind="latent", layers=(0, LAYER), num_kv_heads=1, head_dim=width, value_dim=rank,
        number_format=(FORMATS | KV_FORMATS)[kv_format],
    )  # fmt: skip
    return KVStorage([group], num_blocks=BLOCKS, block_size=BLOCK_SIZE)


@pytest.mark.parametrize(("kv_format", "capability"), [("bfloat16", 90), ("fp8", 80), ("fp8", 90), ("int8", 90)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 16, 2), (40, 12, 8, 19)], ids=["even", "odd"])
def test_every_step_rounds_where_torch_does(
    shape: tuple[int, int, int, int], interleaved: bool, kv_format: str, capability: int
) -> None:
    torch.manual_seed(0)
    rank, rope, nope, heads = shape
    rows, width = 3, rank + rope
    steps = LatentSteps(
        kv_rank=rank, rope_dim=rope, nope_dim=nope, norm=torch.randn(rank).bfloat16(), eps=1e-6, interleaved=interleaved
    )  # fmt: skip
    kv, queries = (torch.randint(-8, 9, s).bfloat16() / 4 for s in [(rows, width), (rows, heads, nope + rope)])
    angles = Angles(*(torch.randint(-2, 3, (rows, 1, rope)) / 2 for _ in range(2)))
    slots, storage, expected = torch.tensor([9, -1, 0]), *(storage_of(width, rank, kv_format) for _ in range(2))
    q = torch.full((rows, heads, width), 7.0, dtype=torch.bfloat16)
    triton_latent_rows(steps, storage.pages(LAYER)[0], kv, queries, q, slots, angles, target=TARGETS[capability])
    rotary = Rotary(RotaryConfig(theta=1e4, rotary_dim=rope, interleaved=interleaved), torch.device("cpu"))
    turned = rotary.rotate(torch.cat([queries[..., nope:], kv[:, None, rank:]], dim=1), angles)
    latent = torch.cat([rms_norm(kv[:, None, :rank], steps.norm, 1e-6), turned[:, heads:]], dim=-1)
    expected.write(LAYER, latent[[0, 2]], None, slots[[0, 2]])
    assert_stored(storage, expected)
    assert_same(q[..., rank:].contiguous(), turned[:, :heads].contiguous())
    assert (q[..., :rank] == 7.0).all()
