"""Which KV blocks of one rank and cache group are free.

Not storage (kvcache/storage.py) and not a policy: it hands out ids and takes them back, same calls same ids.
Shapes: block ids are i32 arrays `[n]`, each in [0, num_blocks).
"""

from __future__ import annotations

import numpy as np


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free; whoever plans must look at `num_free` first."""


class BlockPool:
    """A stack of free block ids: fresh ones come lowest first, returned ones are the next to be given out.

    Args:
        num_blocks: how many blocks the pool owns.

    Example:
        >>> pool = BlockPool(4)
        >>> pool.allocate(2).tolist()
        [0, 1]
        >>> pool.free(np.array([0, 1], np.int32)); pool.allocate(3).tolist()
        [0, 1, 2]
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not allowed; a pool needs at least 1 block")
        self.num_blocks = num_blocks
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # [num_blocks], free ids are [:_num_free]
        self._used = np.zeros(num_blocks, np.bool_)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still give."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks given out and not returned."""
        return self.num_blocks - self._num_free

    def allocate(self, n: int) -> np.ndarray:
        """Return `n` block ids, [n] i32; raises OutOfBlocks and changes nothing when fewer are free."""
        if not 0 <= n <= self._num_free:
            raise OutOfBlocks(f"{n} blocks asked for, {self._num_free} of {self.num_blocks} are free")
        rest = self._num_free - n
        ids = self._stack[rest : self._num_free][::-1].copy()
        self._used[ids] = True
        self._num_free = rest
        return ids

    def free(self, ids: np.ndarray) -> None:
        """Take back `ids` [n] i32; raises ValueError and changes nothing when one of them is not given out."""
        n = len(ids)
        if n == 0:
            return
        outside = int(ids.min()) < 0 or int(ids.max()) >= self.num_blocks
        if outside or len(set(ids.tolist())) != n or not self._used[ids].all():
            raise ValueError(f"blocks {ids.tolist()} were freed, but not all of them are in use")
        self._used[ids] = False
        self._stack[self._num_free : self._num_free + n] = ids[::-1]
        self._num_free += n

    def used_ids(self) -> np.ndarray:
        """Return the ids given out and not returned, ascending, i32."""
        return np.flatnonzero(self._used).astype(np.int32)

    def is_whole(self) -> bool:
        """Tell whether every block is free, exactly once."""
        everything = np.arange(self.num_blocks, dtype=np.int32)
        return (
            self._num_free == self.num_blocks
            and not self._used.any()
            and np.array_equal(np.sort(self._stack), everything)
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is exactly once either free or used."""
        free = self._stack[: self._num_free]
        assert 0 <= self._num_free <= self.num_blocks, self._num_free
        assert np.unique(free).size == free.size, "a block is free twice"
        assert not self._used[free].any(), "a block is free and used"
        assert int(self._used.sum()) + free.size == self.num_blocks, "a block is neither free nor used"
