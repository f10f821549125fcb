"""A real server changes its layout while clients ask: every answer is the one it was, and no old process is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from moewe.server.advise.apply import apply
from moewe.server.advise.command import advise
from moewe.topologies.advisor.trace import read_trace
from tests.support.fixtures import checkpoint, random_prompt
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [random_prompt(length, seed=length) for length in (5, 19, 33)]


def test_clients_do_not_notice_a_change_of_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "advice.jsonl"
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--allow-apply", "--advice-log", str(log),
             "--advice-interval", "1")  # fmt: skip
    with ServerProcess(checkpoint("T-QW3"), *flags, topology="EP2DP1") as server:
        client = server.client(timeout=240)

        def ask(number: int) -> list[int]:
            answer = client.completions.create(
                model=NAME, prompt=PROMPTS[number % len(PROMPTS)], max_tokens=24, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]

        expected = [ask(number) for number in range(len(PROMPTS))]
        done, wrong, answered = threading.Event(), [], [0]

        def keep_asking(number: int) -> None:
            while not done.is_set():
                if ask(number) != expected[number % len(PROMPTS)]:
                    wrong.append(number)
                answered[0] += 1

        threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        before = answered[0]
        assert apply({"url": (server.url,), "topology": "EP1DP2"}) == 0
        during = answered[0] - before
        time.sleep(3)  # windows of the new layout
        done.set()
        for thread in threads:
            thread.join()
        assert not wrong and during > 0
        assert "from EP2DP1 to EP1DP2, beside\nEP1DP2 runs after" in capsys.readouterr().out.replace(server.url, "")
        assert not server.survivors(within=10), "ranks of the old layout are gone"
        view = server.get("/v1/topology").json()
        assert view["dp"] == 2 and all(rank["pid"] for replica in view["replicas"] for rank in replica["ranks"])
        assert server.counters()["moewe_requests_finished_total|error"] == 0
        assert server.get("/v1/topology/advice").json()["topology"].startswith("EP1DP2")
    records = [type(line).__name__ for _, line in read_trace(log)]
    assert records[0] == "FactsLine" and records.count("FactsLine") == 2 and records.count("AppliedLine") == 1
    assert advise({"trace": str(log)}) == 0
