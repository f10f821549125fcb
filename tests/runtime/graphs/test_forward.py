"""What stands between two steps of a GPU: a graph is launched before anything is done for others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moewe.runtime.graphs.capture import StepTensors
from moewe.runtime.graphs.forward import StepForward
from moewe.runtime.graphs.ladder import GraphLadder
from moewe.runtime.plan import StepHeader


def test_a_graph_is_launched_before_results_go_out_and_before_anything_is_counted() -> None:
    log: list[str] = []
    rows = torch.zeros(4, 2)
    left = StepTensors(hidden=rows, logits=rows, best=rows[:, 0].long(), finite=rows[:, 0] == 0, well=rows[:, 0] == 0)

    def replay(shape: object) -> StepTensors:
        log.append(f"launched {shape}")
        return left

    decoder: Any = SimpleNamespace(count=lambda *_, **__: log.append("counted"))
    inputs: Any = SimpleNamespace()
    forward = StepForward(decoder, None, inputs)  # type: ignore[arg-type]
    ladder = GraphLadder(rows=(4,), tokens=(16,), exchange="local")
    forward.graphs = SimpleNamespace(ladder=ladder, holds=lambda _: True, replay=replay)  # type: ignore[assignment]
    header = StepHeader(step=0, epoch=0, kind="decode", bucket=3, exchange="local")
    assert forward.begin(header) == 4
    step: Any = SimpleNamespace(
        forward=None, rows=SimpleNamespace(num_rows=3, segments=(), positions=np.array([1, 15, 2]))
    )
    hidden, found = forward(header, step, lambda: log.append("results go out"), None)
    assert log == ["launched 4 rows of up to 16 tokens", "results go out", "counted"]
    assert len(hidden) == 3 and found is not None and len(found.best) == 3
