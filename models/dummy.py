"""Random weights from a config alone, for benchmarks: the same on every topology.

Not an initialisation for training: norms are 1, biases 0, all else is noise of standard deviation about 0.02, quantised
matrices too: their data are noise and their scales one number.
A parameter is a window into one block of seeded noise, chosen by its name, so an expert does not depend on its rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from .head_shares import Cut

STANDARD_DEVIATION = 0.02
E8M0_OF_NOISE = 120  # times 2^-7: random e2m1 numbers are then about as large as the other noise
BLOCK_ELEMENTS = 4_194_301  # prime, so that no two rows of a matrix begin at the same element of the block


class Noise:
    """Writes noise into parameters, which depends on `seed` and their names; of those in `cuts` a part is held."""

    def __init__(self, seed: int, cuts: Mapping[str, Cut]) -> None:
        self._cuts = cuts
        generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.randn(BLOCK_ELEMENTS, generator=generator) * STANDARD_DEVIATION
        self._packed = torch.randint(0, 256, (BLOCK_ELEMENTS,), generator=generator, dtype=torch.uint8)
        self._blocks: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def fill(
        self, targets: dict[str, list[torch.Tensor]], *, num_threads: int, on_filled: Callable[[torch.Tensor], None]
    ) -> None:
        """Write into all `targets` (parameter name -> views); `on_filled` is told each view that is done."""
        views = [(name, view) for name, several in targets.items() for view in several]
        for dtype, device in {(view.dtype, view.device) for _, view in views} - self._blocks.keys():
            block = self._packed if dtype == torch.uint8 else self._numbers
            self._blocks[dtype, device] = block.to(device=device, dtype=dtype)

        def fill(item: tuple[str, torch.Tensor]) -> torch.Tensor:
            name, view = item
            block, cut = self._blocks[view.dtype, view.device], self._cuts.get(name)
            if cut is None:
                return _fill(name, view, block)
            return view.copy_(cut.of(_fill(name, view.new_empty(cut.shape), block)))

        with ThreadPoolExecutor(num_threads) as pool:
            for view in pool.map(fill, views):
                on_filled(view)


def _fill(name: str, view: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return view.fill_(1.0)
    if name.endswith("bias"):
        return view.zero_()
    if name.endswith("weight_scale"):
        return view.fill_(E8M0_OF_NOISE if view.dtype == torch.uint8 else 1.0)
    flat, position = view.view(-1), 0
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % len(block)
    while position < len(flat):
        count = min(len(block) - start, len(flat) - position)
        flat[position : position + count] = block[start : start + count]
        position, start = position + count, 0
    return view
