"""Single experts of a checkpoint, read while a model serves, in the form in which a rank holds them.

Not the start (loading.py), whose path it takes: the same byte ranges, packing and quantising, so the same bits.
The files stay open, so that a folder which is replaced meanwhile changes nothing.
Units: bytes.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..moe.gated import ExpertWeights
from .allocation import Targets, WeightParts
from .checkpoint import open_checkpoint
from .config import ModelConfig
from .filling import Files, Progress, Random, Source
from .loading import LoadOptions, prove_filled
from .name_map import Piece, match_tensors
from .packing import pack_experts
from .tensor_names import EXPERT


class ExpertReader:
    """Reads experts; one thread at a time.

    Args:
        path: model folder; not read for dummy weights.
        config: of the whole model.
        options: as the rank was loaded with.

    Raises:
        ConfigError: the checkpoint is incomplete, damaged, or of another model.
    """

    def __init__(self, path: Path, config: ModelConfig, options: LoadOptions) -> None:
        self._config, self._options = config, options
        self._parts = WeightParts(config, options.placement, options.rank, dtype=options.dtype, device=options.device)
        self._stack = ExitStack()
        self._pieces: dict[str, Piece] = {}
        self._source: Source
        if options.dummy:
            self._source = Random(options.seed, 1, {})
            return
        with ExitStack() as stack:
            checkpoint = stack.enter_context(open_checkpoint(path))
            matched = match_tensors(checkpoint.tensors, config)
            stem = f".{EXPERT.split('#')[0]}"
            pieces = [piece for piece in matched.pieces if any(stem in part for part in piece.parts)]
            self._pieces = {part: piece for piece in pieces for part in piece.parts}
            self._source = Files(pieces, 1)
            self._stack = stack.pop_all()

    def read(self, layer: int, expert: int) -> ExpertWeights:
        """Return `expert` of decoder layer number `layer`: one slot.

        Raises:
            ConfigError: a file cannot be read, or was changed since it was opened.
        """
        weights, targets = self._parts.experts(layer, [expert])
        prove_filled(weights, self._source.fill(targets, Progress(_quiet, 0)))
        self._check_files(targets)
        if self._options.pack:
            targets.clear()  # what is packed in place may not be held elsewhere
            pack_experts(weights, self._options.scheme)
        return weights

    def close(self) -> None:
        """Close the files; allowed more than once."""
        self._stack.close()

    def _check_files(self, targets: Targets) -> None:
        for piece in [self._pieces[name] for name in targets if name in self._pieces]:
            piece.stored.file.check_unchanged()


def _quiet(done: int, total: int) -> None:
    """Tell nobody."""
