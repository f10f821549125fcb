"""Which KV blocks of one cache group are free, on every rank.

Not storage (kvcache/storage.py) and not a policy: it hands out ids and takes them back, same calls same ids.
Shapes: W ranks, each with blocks of its own; ranks i64 and block ids i32 are arrays `[n]`, ids in [0, num_blocks).
"""

from __future__ import annotations

import numpy as np


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free; whoever plans must look at `num_free` first."""


class BlockPool:
    """A stack of free block ids for each rank: fresh ones come lowest first, returned ones are the next to be given.

    A step touches some blocks of many ranks, so both calls take them all at once: a few numpy operations, however many
    ranks there are.

    Args:
        num_blocks: how many blocks each rank owns.
        num_ranks: W.

    Attributes:
        num_free: [W] i64, blocks that `allocate` can still give; read only.

    Example:
        >>> pool = BlockPool(4, num_ranks=2)
        >>> pool.allocate(np.array([0, 0, 1])).tolist()
        [0, 1, 0]
        >>> pool.free(np.array([0, 0]), np.array([0, 1], np.int32)); pool.allocate(np.array([0, 0, 0, 1])).tolist()
        [0, 1, 2, 1]
    """

    def __init__(self, num_blocks: int, num_ranks: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not allowed; a pool needs at least 1 block")
        self.num_blocks, self.num_ranks = num_blocks, num_ranks
        fresh = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._stack = np.repeat(fresh[None], num_ranks, 0)  # [W, num_blocks], free ids are [:num_free]
        self._used = np.zeros((num_ranks, num_blocks), np.bool_)
        self.num_free = np.full(num_ranks, num_blocks, np.int64)

    @property
    def num_used(self) -> np.ndarray:
        """Blocks given out and not returned, [W]."""
        used: np.ndarray = self.num_blocks - self.num_free
        return used

    def allocate(self, ranks: np.ndarray) -> np.ndarray:
        """Return a block of each of `ranks`, ascending, [n] i32; raises OutOfBlocks, changing nothing, if one lacks."""
        counts = np.bincount(ranks, minlength=self.num_ranks)
        if (counts > self.num_free).any():
            rank = int(np.argmax(counts - self.num_free))
            raise OutOfBlocks(
                f"{counts[rank]} blocks asked for on rank {rank}, {self.num_free[rank]} of {self.num_blocks} are free"
            )
        ids: np.ndarray = self._stack.reshape(-1)[self._tops(ranks, counts, self.num_free)]
        self._used.reshape(-1)[ranks * self.num_blocks + ids] = True
        self.num_free -= counts
        return ids

    def free(self, ranks: np.ndarray, ids: np.ndarray) -> None:
        """Take back blocks `ids` of `ranks`, ascending; raises ValueError, changing nothing, if one is not in use."""
        if not len(ids):
            return
        inside = int(ids.min()) >= 0 and int(ids.max()) < self.num_blocks
        used, places = self._used.reshape(-1), ranks * self.num_blocks + ids
        if not inside or not used[places].all() or _holds_twice(places):
            raise ValueError(f"blocks {ids.tolist()} were freed, but not all of them are in use")
        used[places] = False
        counts = np.bincount(ranks, minlength=self.num_ranks)
        self.num_free += counts
        self._stack.reshape(-1)[self._tops(ranks, counts, self.num_free)] = ids

    def _tops(self, ranks: np.ndarray, counts: np.ndarray, heights: np.ndarray) -> np.ndarray:
        """Return where the topmost `counts` [W] entries of stacks as high as `heights` [W] are, from the top down.

        `ranks` [n] are theirs, ascending; the places are those in all stacks, one after another.
        """
        tops = np.arange(self.num_ranks) * self.num_blocks + heights - 1
        places: np.ndarray = (tops + counts.cumsum() - counts)[ranks] - np.arange(len(ranks))
        return places

    def used_ids(self, rank: int = 0) -> np.ndarray:
        """Return the ids of `rank` given out and not returned, ascending, i32."""
        return np.flatnonzero(self._used[rank]).astype(np.int32)

    def is_whole(self) -> bool:
        """Tell whether every block of every rank is free, exactly once."""
        everything = np.arange(self.num_blocks, dtype=np.int32)
        return (
            bool((self.num_free == self.num_blocks).all())
            and not self._used.any()
            and bool((np.sort(self._stack, 1) == everything).all())
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block of every rank is exactly once either free or used."""
        assert ((self.num_free >= 0) & (self.num_free <= self.num_blocks)).all(), self.num_free
        for rank, num_free in enumerate(self.num_free.tolist()):
            free = self._stack[rank, :num_free]
            assert np.unique(free).size == free.size, f"a block of rank {rank} is free twice"
            assert not self._used[rank, free].any(), f"a block of rank {rank} is free and used"
            assert int(self._used[rank].sum()) + free.size == self.num_blocks, f"rank {rank} has lost a block"


def _holds_twice(values: np.ndarray) -> bool:
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1]).any())
