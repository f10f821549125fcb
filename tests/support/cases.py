"""The edge cases of routing, named once and shared by every MoE test.

Not random testing (hypothesis does that) and not expectations: only inputs.
Shapes: a case holds for each of W ranks the ids [T, K] i32 that its tokens chose; T may differ between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class RoutingCase:
    """Ids of all ranks over `num_experts` experts (= slots, placed in order over the ranks)."""

    name: str
    num_experts: int
    ids: list[torch.Tensor]

    @property
    def num_ranks(self) -> int:
        return len(self.ids)

    @property
    def top_k(self) -> int:
        return self.ids[0].shape[1]

    def inputs(self, width: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """Seeded rows [T, width] of every rank."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(ids.shape[0], width, generator=generator).to(dtype) for ids in self.ids]

    def weights(self, seed: int = 1) -> list[torch.Tensor]:
        """Seeded weights [T, K] f32 of every rank; NaN where an id is -1, because nobody may read them."""
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.rand(ids.shape, generator=generator) for ids in self.ids]
        return [w.masked_fill(ids < 0, torch.nan) for w, ids in zip(weights, self.ids)]


def random_ids(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Seeded distinct ids: [T, K] i32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].to(torch.int32)


def _case(name: str, num_experts: int, ids: list[torch.Tensor]) -> RoutingCase:
    return RoutingCase(name=name, num_experts=num_experts, ids=ids)


def _ids(rows: list[list[int]], top_k: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), top_k)


ROUTING_CASES = [
    _case("one_rank", 8, [random_ids(7, 2, 8)]),
    _case("two_ranks", 8, [random_ids(5, 2, 8), random_ids(5, 2, 8, seed=1)]),
    _case("unequal_rows", 8, [random_ids(1, 3, 8), random_ids(19, 3, 8, seed=1)]),
    _case("empty_rank", 8, [random_ids(6, 2, 8), _ids([], 2)]),
    _case("no_rows_at_all", 8, [_ids([], 2), _ids([], 2)]),
    _case("one_row", 4, [_ids([[3, 1]], 2)]),
    _case("one_row_of_four_ranks", 8, [_ids([], 2), _ids([[6, 0]], 2), _ids([], 2), _ids([], 2)]),
    _case("all_experts_chosen", 4, [random_ids(5, 4, 4), random_ids(3, 4, 4, seed=1)]),
    _case("empty_experts", 8, [_ids([[0, 1]] * 6, 2), _ids([[1, 0]] * 4, 2)]),
    _case("all_rows_to_one_expert", 8, [_ids([[7]] * 9, 1), _ids([[7]] * 4, 1), _ids([[7]] * 5, 1), _ids([[7]], 1)]),
    _case("duplicate_ids", 8, [_ids([[2, 2], [5, 2]], 2), _ids([[2, 2], [7, 7], [0, 0]], 2)]),
    _case("dropped_ids", 8, [_ids([[-1, 3], [4, -1], [-1, -1]], 2), _ids([[-1, -1], [0, 7]], 2)]),
    _case("all_dropped", 4, [_ids([[-1, -1]] * 3, 2), _ids([[-1, -1]], 2)]),
    _case("uneven_slots", 10, [random_ids(t, 4, 10, seed=t) for t in (3, 0, 8, 1)]),
    _case("many_experts", 1500, [random_ids(65, 8, 1500), random_ids(33, 8, 1500, seed=1)]),
    _case("twelve_of_sixteen", 16, [random_ids(33, 12, 16), random_ids(2, 12, 16, seed=1)]),
]

routing_cases = pytest.mark.parametrize("case", ROUTING_CASES, ids=lambda case: case.name)


@st.composite
def drawn_cases(draw: st.DrawFn) -> RoutingCase:
    """Draw ids of up to four ranks: none, some or repeated slots for each token, dropped choices among them."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(num_ranks, 9))
    top_k = draw(st.integers(1, 4))
    id_rows = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    return _case("random", num_experts, [_ids(draw(st.lists(id_rows, max_size=6)), top_k) for _ in range(num_ranks)])
