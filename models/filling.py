"""What fills the tensors of a rank: the files of a checkpoint, or noise; and how far it is.

Not what is held (`allocation`) and not which byte range goes where (`reads`): a part of the model is filled at a time.
Units: bytes. Told and called on one thread; the reading itself is spread over several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol

import torch

from .dummy import Noise
from .head_shares import Cut
from .name_map import Piece
from .reads import Read, Spans, Staging, plan_piece

OnProgress = Callable[[int, int], None]
Targets = dict[str, list[torch.Tensor]]


class Progress:
    """Adds up what is read (or made) and then packed: both are parts of one total.

    Args:
        on_progress: told (done, total), at once and whenever something is added.
        total: bytes in all.
    """

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress, self._done, self._total = on_progress, 0, total
        on_progress(0, total)

    def add(self, num_bytes: int) -> None:
        """Tell that so many bytes more are done."""
        self._done += num_bytes
        self._on_progress(self._done, self._total)


class Source(Protocol):
    """Where the numbers come from."""

    def num_bytes(self, targets: Targets) -> int:
        """Return what filling `targets` will add to the progress; they need not have memory."""
        ...

    def fill(self, targets: Targets, progress: Progress) -> Spans:
        """Fill `targets` (parameter name -> views); returns the address ranges that were written."""
        ...


class Files:
    """The weight files of a checkpoint, by the pieces that hold its parameters; `num_threads` read at once."""

    def __init__(self, pieces: Iterable[Piece], num_threads: int) -> None:
        self._pieces = {part: piece for piece in pieces for part in piece.parts}
        self._num_threads = num_threads

    def num_bytes(self, targets: Targets) -> int:
        """Return what `fill` will read."""
        return sum(read.num_bytes for read in self._reads(targets))

    def fill(self, targets: Targets, progress: Progress) -> Spans:
        """Read all that `targets` need, in the order of the files."""
        staging, written = Staging(), Spans()
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="load") as pool:
            futures = {pool.submit(read.run, staging): read for read in self._reads(targets)}
            try:
                for future in as_completed(futures):
                    written += future.result()
                    progress.add(futures[future].num_bytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return written

    def _reads(self, targets: Targets) -> list[Read]:
        pieces = {id(self._pieces[name]): self._pieces[name] for name in targets}
        reads = [read for piece in pieces.values() for read in plan_piece(piece, targets)]
        return sorted(reads, key=lambda read: read.position)


class Random:
    """Noise in place of a checkpoint, the same for a parameter wherever it is held, whole or in part by `cuts`.

    `num_threads` fill at once.
    """

    def __init__(self, seed: int, num_threads: int, cuts: Mapping[str, Cut]) -> None:
        self._noise, self._num_threads = Noise(seed, cuts), num_threads

    def num_bytes(self, targets: Targets) -> int:
        """Return what `fill` will write."""
        return sum(view.nbytes for views in targets.values() for view in views)

    def fill(self, targets: Targets, progress: Progress) -> Spans:
        """Write all `targets`."""
        written = Spans()

        def on_filled(view: torch.Tensor) -> None:
            written.append((view.data_ptr(), view.data_ptr() + view.nbytes))
            progress.add(view.nbytes)

        self._noise.fill(targets, num_threads=self._num_threads, on_filled=on_filled)
        return written
