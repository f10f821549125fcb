"""For what the host waits in a step on a GPU, which only pretends to be there (test_placement.py): the device, once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from moewe.runtime import counter_reports
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import RankPlan, RankResult, StepHeader, TokenMask
from moewe.runtime.ranks.host_memory import pinned
from moewe.runtime.ranks.masks import pack_mask
from moewe.telemetry.progress import TICK
from tests.gpu.test_placement import GREEDY, REQUESTS, SETUP, Ranks
from tests.gpu.test_wired import SMALLER
from tests.support.fake_gpu import DEVICE, fake_gpu
from tests.support.fixtures import checkpoint

pytestmark = pytest.mark.slow  # torch's fakes take seconds to import


@pytest.mark.parametrize(
    ("asked", "num_launches"),
    [
        ({"temperature": 0.0}, 0),
        ({"top_p": 0.9, "top_k": 5}, 1),
        ({"top_k": 5, "logit_bias": {3: 1.0}, "min_tokens": 6, "stop_token_ids": [5]}, 2),
    ],
    ids=["greedy", "chance", "chance-behind-edits"],
)
def test_steps_that_are_replayed_wait_once(
    asked: dict[str, Any], num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for their stream behind the copies of their results, which do not wait; tokens are drawn before."""
    monkeypatch.setattr(counter_reports, "EVERY_S", 1e9)  # counters are read with the last step alone
    path, seen = checkpoint("T-GOS", **SMALLER["T-GOS"]), []
    with fake_gpu() as gpu:
        ranks = Ranks(path, SETUP)

        def so_far() -> tuple[int, ...]:
            stream: Any = torch.cuda.current_stream(DEVICE)
            ticks = int(ranks.workers[0]._progress._row[TICK])
            return ticks, len(gpu.launches), len(gpu.waits), stream.synchronize.call_count

        before = so_far()

        def on_step(kind: str) -> None:
            nonlocal before
            now = so_far()
            seen.append((kind, *(new - old for new, old in zip(now, before, strict=True))))
            before = now

        ranks.run([(20, SamplingParams(max_tokens=6, ignore_eos=True, **asked))], on_step)
    (prefill, *_), *decodes, last = seen
    assert prefill == "prefill" and decodes == [("decode", 1, num_launches, 0, 1)] * 4
    assert last[:3] == ("decode", 1, num_launches)  # counters go out with it


def test_steps_copy_nothing_from_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With masks of a grammar, all edits of logits, chance, and log-probabilities of tokens and prompts."""
    path = checkpoint("T-GOS", **SMALLER["T-GOS"])
    asked = msgspec.structs.replace(REQUESTS[1][1], top_p=0.9, top_k=5, min_p=0.01, logprobs=2, prompt_logprobs=1)
    with fake_gpu() as gpu:
        ranks = Ranks(path, SETUP)
        (worker,) = ranks.workers
        run, words = worker.run, pack_mask(np.ones(worker.model_config.vocab_size, np.bool_))

        def masked(header: StepHeader, plan: RankPlan) -> RankResult:
            masks = tuple(TokenMask(slot=slot, words=words) for slot in (0, 1))
            return run(header, msgspec.structs.replace(plan, masks=masks))

        monkeypatch.setattr(worker, "run", masked)
        gpu.pageable.clear()
        assert ranks.run([(20, asked), (3, asked), (5, GREEDY)]) == 14
        assert not gpu.pageable
        torch.ones(2).to(DEVICE, non_blocking=True)
        pinned((2,), torch.float32, DEVICE).to(DEVICE)
        assert gpu.pageable == ["to: (2,) torch.float32"]
