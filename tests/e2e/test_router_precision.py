"""A bf16 model whose router rows are almost alike: its experts are chosen in fp32, whatever shares the batch."""

import pytest
import torch

from tests.support.fixtures import checkpoint, copy_checkpoint, read_tensors, rewrite_tensors
from tests.support.harness import Group
from tests.support.numerics import assert_same
from tests.support.setups import Setup

NUM_TOKENS = 4096
ROUTER = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def near_ties(router_dtype):
    """T-DS3 in bf16; every second row of its routers is the row before it and a little more."""

    def change(tensors):
        noise = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        for name, tensor in tensors.items():
            if name.endswith("gate.weight"):
                tensor[1::2] = tensor[::2] + (1e-3 * noise).to(tensor.dtype)
        return {n: t.to(router_dtype) if n.endswith("gate.weight") else t for n, t in tensors.items()}

    return rewrite_tensors(copy_checkpoint(checkpoint("T-DS3", dtype="bfloat16")), change)


def expected_ids(path, x):
    """Return the sets that arithmetic in fp64 chooses: 4 of 16 out of 2 of 4 groups, [T, 4] i64."""
    tensors = read_tensors(path)
    scores = (x.double() @ tensors[ROUTER].double().T).sigmoid() + tensors[BIAS].double()
    worth = scores.unflatten(-1, (4, 4)).topk(2, -1).values.sum(-1)
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(2, -1).indices, False)
    return scores.masked_fill(outside.repeat_interleave(4, -1), -torch.inf).topk(4, -1).indices.sort(-1).values


# --- P-EP-06 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("router_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_a_bf16_model_are_chosen_in_fp32(router_dtype):
    path = near_ties(router_dtype)
    x = torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with Group(path, Setup(dtype="bfloat16")) as group:
        layer = group.workers[0].decoder._layers[1].moe

        def choose(rows):
            return layer._choose(rows, None)[0].long().sort(-1).values  # one rank: slots are experts

        in_64s = torch.cat([choose(rows) for rows in x.split(64)])
        alone = torch.cat([choose(rows) for rows in x[:1024].split(1)])
    assert_same(alone, in_64s[:1024])
    assert (in_64s == expected_ids(path, x)).all(-1).double().mean() >= 0.999
