"""P-OPS-01: one server process over two replicas counts every request once, and no counter ever falls."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.chain import chain
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

REQUESTS, TOKENS, SCRAPES, AT_ONCE = 50, 20, 20, 10


def scrape(server: ServerProcess) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_totals_over_two_replicas_are_monotone_and_right() -> None:
    with ServerProcess(chain(list("abcdefgh"), loop=True).path, "--max-num-seqs", "4", topology="EP1DP2") as server:

        def ask() -> None:
            client = server.client()
            for _ in range(REQUESTS // AT_ONCE):
                client.completions.create(model=NAME, prompt="x", max_tokens=TOKENS, temperature=0)

        threads = [threading.Thread(target=ask) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        seen = [scrape(server)]
        for _ in range(SCRAPES):
            time.sleep(0.05)
            seen.append(scrape(server))
        for thread in threads:
            thread.join()
        server.wait_idle(within=3.0)
        deadline = time.monotonic() + 3.0
        while (
            True
        ):  # until the last counters are in: of each request one row of its prompt, and one a token but the last
            last = scrape(server)
            rows = sum(n for (name, labels), n in last.items() if name == "moewe_batch_tokens_total")
            if rows >= REQUESTS * TOKENS or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    seen.append(last)
    for before, after in pairwise(seen):
        for series, value in before.items():
            if series[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert after[series] >= value, series
    assert last["moewe_requests_finished_total", (("reason", "length"),)] == REQUESTS
    assert last["moewe_generation_tokens_total", ()] == REQUESTS * TOKENS
    assert last["moewe_prompt_tokens_total", ()] == REQUESTS
    assert rows == REQUESTS * TOKENS
    for replica in "01":
        labels = (("phase", "decode"), ("rank", "0"), ("replica", replica))
        assert last["moewe_steps_total", labels] > 0, "both replicas worked"
    names = {name for _, labels in last for name, _ in labels}
    assert names <= {
        "replica", "rank", "phase", "component", "scope", "kind", "format", "part", "reason", "status", "le", "by",
        "version", "model", "topology",
    }  # fmt: skip
