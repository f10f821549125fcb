"""A device that captures what torch and Triton's interpreter do, as a CUDA graph would keep it, and does it again.

Not a GPU: what is captured runs while it is recorded. As in a graph, a replay reads and writes the very tensors of the
capture, and whatever Python worked out meanwhile has become a constant. What the capture itself computed is spoilt
afterwards, so that nobody can live on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moewe.moe.wide_ep.exchanges.links import Link, Pending
from moewe.native.gpu import Launch

_recording = threading.local()
_interpreter = threading.Lock()  # Triton's keeps where it is in variables of its module


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


FORK, JOIN = "fork", "join"


@dataclass(frozen=True)
class Node:
    """A part of a graph: an operation of torch, the launch of a kernel, or one end of a collective."""

    name: str
    run: Callable[[], None]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in storages]
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value came to the host within a capture"
        if not fresh and not func._schema.is_mutable:
            return result  # a view of what is there

        def again() -> None:
            found = _tensors(func(*args, **kwargs))
            for old, new in zip(_tensors(result), found, strict=True):
                if any(old is own for own in fresh):
                    old.copy_(new)

        self.nodes.append(Node(func.overloadpacket.__name__, again))
        self.made += fresh
        return result


class RecordedGraph:
    """What was captured."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes, self.num_replays = tuple(nodes), 0

    @property
    def names(self) -> list[str]:
        return [node.name for node in self._nodes]

    def meanwhile(self) -> list[list[str]]:
        """Return for each collective, in the order in which they begin, what stands between its fork and its join."""
        names, open_from, found = self.names, [], {}
        for at, name in enumerate(names):
            if name == FORK:
                open_from.append(at)
            elif name == JOIN:  # ends are taken in the order of beginnings
                begun = open_from.pop(0)
                found[begun] = [other for other in names[begun + 1 : at] if other not in (FORK, JOIN)]
        assert not open_from, "a collective is never waited for"
        return [found[begun] for begun in sorted(found)]

    def replay(self) -> None:
        self.num_replays += 1
        for node in self._nodes:
            node.run()


class RecordingDevice:
    """`GraphDevice`: captures all that it is asked for, but for what `fails` says.

    Args:
        fails: called before each capture; what it raises is what capturing raises.
    """

    def __init__(self, fails: Callable[[int], None] | None = None) -> None:
        self.graphs: list[RecordedGraph] = []
        self.num_captures = 0
        self.fails = fails

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        self.num_captures += 1
        if self.fails is not None:
            self.fails(self.num_captures)
        recorder = _recording.recorder = _Recorder()
        try:
            with recorder:
                run()
        finally:
            _recording.recorder = None
        for tensor in recorder.made:
            if tensor.is_floating_point() and tensor.dtype.itemsize != 1:
                tensor.fill_(torch.nan)
        self.graphs.append(RecordedGraph(recorder.nodes))
        return self.graphs[-1]

    def wait(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return 1000 * len(self.graphs)


@contextmanager
def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record launches of interpreted kernels as nodes, whole: their bodies are not torch's business."""
    unlocked = Launch.run

    def really(launch: Launch) -> None:
        with _interpreter:
            unlocked(launch)

    def run(launch: Launch) -> None:
        recorder: _Recorder | None = getattr(_recording, "recorder", None)
        if recorder is None:
            really(launch)
            return
        with torch.utils._python_dispatch._disable_current_modes():
            really(launch)
        recorder.nodes.append(Node(launch.name, lambda: really(launch)))

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", run)
        yield


class RecordedLink:
    """`Link` whose collectives a graph can hold, over one that joins threads. Within a capture none is begun.

    As on a GPU, whose exchange has a stream of its own, a collective is a branch of the graph: it may run from FORK on,
    where it was begun, and must have run at JOIN, where its rows were asked for.

    Args:
        link: what really joins the members.
        late: in a replay it runs at JOIN, else at FORK. Whatever is computed between them must not show which.
    """

    def __init__(self, link: Link, *, late: bool = False) -> None:
        self._link, self.size, self.index, self.held_bytes = link, link.size, link.index, 0
        self._late = late

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], *, evenly: bool = False
    ) -> Pending:
        return self._branch(lambda: self._link.start(rows, sent, received, evenly=evenly)(), rows, sum(received))

    def gather(self, rows: torch.Tensor) -> Pending:
        return self._branch(lambda: self._link.gather(rows)(), rows, self.size * len(rows))

    def _branch(self, run: Callable[[], torch.Tensor], rows: torch.Tensor, num_arriving: int) -> Pending:
        recorder: _Recorder | None = getattr(_recording, "recorder", None)
        if recorder is None:
            return run
        with torch.utils._python_dispatch._disable_current_modes():
            arrived = rows.new_zeros(num_arriving, rows.shape[1])

        def begin() -> None:
            arrived.fill_(0xAA)  # nobody is to read it before the join
            if not self._late:
                arrived.copy_(run())

        def end() -> None:
            if self._late:
                arrived.copy_(run())

        def wait() -> torch.Tensor:
            nodes.append(Node(JOIN, end))
            return arrived

        nodes = recorder.nodes
        nodes.append(Node(FORK, begin))
        return wait
