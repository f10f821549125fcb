"""Every family once in processes, as it is served: an engine and its ranks, the reference's tokens.

Two ranks where families differ most, else one in the engine: what crosses between ranks is rows, whatever the family.
"""

import pytest

from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.params import SamplingParams
from moewe.runtime.prompts import packed
from moewe.runtime.replicas import ReplicaSet
from tests.runtime.test_generation import descendants, is_gone
from tests.support.comparison import compare_choices
from tests.support.fixtures import DENSE_FIXTURES, FIXTURES, checkpoint, random_prompt, reference_logits
from tests.support.matrix import UNLIKE
from tests.support.polling import finish

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(300)]

READY_S = 120
LENGTHS = (33, 1, 17, 50)
PAIRS = set(UNLIKE) - set(DENSE_FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_ranks_in_processes_answer_as_the_reference(name):
    path = checkpoint(name)
    replicas = ReplicaSet.start(
        EngineConfig(
            model=ModelOptions(model=name, path=str(path), skip_tokenizer_init=True, dtype="float32"),
            parallel=ParallelOptions(topology="EP2DP1" if name in PAIRS else "EP1DP1", threads=1),
            cache=CacheOptions(num_blocks=64),
            schedule=ScheduleOptions(max_num_seqs=8, max_num_batched_tokens=32),
        )
    )
    try:
        replicas.wait_ready(READY_S)
        pids = descendants(replicas)
        prompts = {f"of-{length}": random_prompt(length, seed=length) for length in LENGTHS}
        for request_id, prompt in prompts.items():
            replicas.submit(request_id, packed(prompt), SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        told, ended = finish(replicas, len(prompts))
    finally:
        replicas.close()
    assert set(ended.values()) == {"length"}
    for request_id, prompt in prompts.items():
        assert len(told[request_id]) == 16
        reference = reference_logits(path, (prompt + told[request_id])[:-1])
        compare_choices(reference[len(prompt) - 1 :], told[request_id])
    assert all(is_gone(pid) for pid in pids)
