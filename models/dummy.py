"""Random weights from a config alone, for benchmarks: the same on every topology.

Not an initialisation for training: norms are 1, biases 0, all else is noise of standard deviation about 0.02, quantised
matrices too: their data are noise and their scales one number.
A parameter is a window into one block of seeded noise, chosen by its name, so an expert does not depend on its rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

STANDARD_DEVIATION = 0.02
E8M0_OF_NOISE = 120  # times 2^-7: random e2m1 numbers are then about as large as the other noise
BLOCK_ELEMENTS = 4_194_301  # prime, so that no two rows of a matrix begin at the same element of the block


def fill_randomly(
    targets: dict[str, list[torch.Tensor]],
    *,
    seed: int,
    num_threads: int,
    on_filled: Callable[[torch.Tensor], None],
) -> None:
    """Write noise into all `targets` (parameter name -> views); `on_filled` is told each view that is done."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(BLOCK_ELEMENTS, generator=generator) * STANDARD_DEVIATION
    views = [(name, view) for name, several in targets.items() for view in several]
    packed = torch.randint(0, 256, (BLOCK_ELEMENTS,), generator=generator, dtype=torch.uint8)
    kinds = {(view.dtype, view.device) for _, view in views}
    blocks = {
        (dtype, device): (packed if dtype == torch.uint8 else noise).to(device=device, dtype=dtype)
        for dtype, device in kinds
    }

    def fill(item: tuple[str, torch.Tensor]) -> torch.Tensor:
        name, view = item
        return _fill(name, view, blocks[view.dtype, view.device])

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
