"""`moewe top`: figures from two readings, what is drawn of them, and the command against servers that come and go."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moewe.server.client.asking import NoAnswerError
from moewe.server.top.command import Server, top
from moewe.server.top.figures import RankFigures, ServerFigures, figures, quantile, restarted
from moewe.server.top.scrape import Reading, parse_metrics, read_server
from moewe.server.top.view import Lost, _size, bar, draw
from moewe.telemetry import MEMORY_PARTS


def metrics(*, steps: int = 0, tokens: int = 0, ranks: int = 2, resident: bool = False) -> str:
    """What a server says that reached `steps` steps: each takes 0.1 s and moves 1 GB of 20 GB/s."""
    lines = [
        'moewe_info{version="1",model="demo",topology="EP2DP1"} 1',
        "moewe_ready 1",
        f"moewe_generation_tokens_total {tokens}",
        'moewe_requests_running{replica="0"} 3',
        'moewe_requests_waiting{replica="0"} 1',
        'moewe_expert_imbalance_ratio{replica="0",scope="rank"} 1.25',
        'moewe_expert_imbalance_ratio{replica="0",scope="slot"} 3.5',
        "# TYPE moewe_time_to_first_token_seconds histogram",
        f'moewe_time_to_first_token_seconds_bucket{{le="0.1"}} {steps}',
        f'moewe_time_to_first_token_seconds_bucket{{le="+Inf"}} {steps}',
        "# TYPE moewe_time_per_output_token_seconds histogram",
        f'moewe_time_per_output_token_seconds_bucket{{le="0.2"}} {steps}',
        f'moewe_time_per_output_token_seconds_bucket{{le="+Inf"}} {steps}',
        "# TYPE moewe_inter_token_latency_seconds histogram",
        f'moewe_inter_token_latency_seconds_bucket{{le="0.4"}} {tokens}',
        f'moewe_inter_token_latency_seconds_bucket{{le="+Inf"}} {tokens}',
        f'moewe_cache_resident{{replica="0"}} {int(resident)}',
        'moewe_memory_bandwidth_ceiling_bytes_per_second{replica="0"} 20000000000',
    ]
    for rank in range(ranks):
        which = f'replica="0",rank="{rank}"'
        lines += [
            f"moewe_kv_blocks{{{which}}} 100",
            f"moewe_kv_usage_ratio{{{which}}} 0.5",
            f'moewe_bound{{{which},by="{("link", "imbalance")[rank % 2]}"}} 1',
            f'moewe_busy_seconds_total{{{which},phase="decode"}} {0.1 * steps}',
            f'moewe_steps_total{{{which},phase="decode"}} {steps}',
            f'moewe_memory_bytes_total{{{which},phase="decode",component="routed"}} {750_000_000 * steps}',
            f'moewe_memory_bytes_total{{{which},phase="decode",component="kv"}} {250_000_000 * steps}',
            f'moewe_memory_bytes_total{{{which},phase="decode",component="exchange"}} {10**12 * steps}',
            f'moewe_exchange_bytes_total{{{which},scope="between"}} {1000 * steps}',
        ]
        for i, part in enumerate(MEMORY_PARTS):
            lines.append(f'moewe_rank_memory_bytes{{{which},part="{part}"}} {(rank + 1) * 10 ** (4 + i)}')
    return "\n".join(lines) + "\n"


def reading(taken: float, topology: dict[str, Any] | None = None, **more: Any) -> Reading:
    return Reading(taken=taken, samples=parse_metrics(metrics(**more)), topology=topology or {})


TOPOLOGY = {"replicas": [{"replica": 0, "ranks": [{"rank": 0, "domain": 0}, {"rank": 1, "domain": 1}]}]}


def test_figures_are_what_happened_between_two_readings() -> None:
    found = figures("u", reading(10.0, steps=5, tokens=50), reading(12.0, TOPOLOGY, steps=15, tokens=150))
    assert (found.model, found.topology, found.ready) == ("demo", "EP2DP1", True)
    assert found.tokens_per_second == 50.0 and found.running == 3 and found.waiting == 1
    assert found.imbalance == 1.25 and found.link_bytes == {"domain": 0.0, "between": 10_000.0}
    assert (found.ttft_p50, found.tpot_p50, found.itl_p50) == pytest.approx((0.05, 0.1, 0.2))
    assert (found.ttft_p95, found.tpot_p95, found.itl_p95) == pytest.approx((0.095, 0.19, 0.38))
    rank = found.ranks[1]
    assert [rank.bound for rank in found.ranks] == ["link", "imbalance"]
    assert (rank.replica, rank.rank, rank.domain) == (0, 1, 1)
    assert rank.components["routed"] == pytest.approx(0.375) and rank.components["kv"] == pytest.approx(0.125)
    assert rank.saturation == pytest.approx(0.5) and rank.busy == pytest.approx(0.5) and rank.kv_usage == 0.5
    assert rank.memory == {part: 2 * 10.0 ** (4 + i) for i, part in enumerate(MEMORY_PARTS)}
    assert json.loads(json.dumps(found.as_dict()))["ranks"][0]["saturation"] == pytest.approx(0.5)


def priced(taken: float, price: str, **more: int) -> Reading:
    """A reading of a server that names a price; three prompt tokens to one of output."""
    text = metrics(**more) + f"moewe_price_per_hour {price}\nmoewe_prompt_tokens_total {3 * more['tokens']}\n"
    return Reading(taken=taken, samples=parse_metrics(text))


def test_cost_is_the_price_of_the_time_between_over_the_tokens_of_it() -> None:
    found = figures("u", priced(10.0, "7.2", tokens=50), priced(12.0, "7.2", tokens=2_050))
    assert found.price_per_hour == 7.2
    assert found.cost_per_million_tokens == pytest.approx({"prompt": 2 / 3, "output": 2.0, "all": 0.5})
    assert json.loads(json.dumps(found.as_dict()))["cost_per_million_tokens"]["output"] == pytest.approx(2.0)
    assert any("2 for 1M output tokens" in line for line in drawn([found]))


@pytest.mark.parametrize("price", ["7.2", "NaN", "+Inf", "-1", "0"])
def test_there_is_no_cost_without_tokens_or_a_price(price: str) -> None:
    tokens = 0 if price == "7.2" else 100
    found = figures("u", priced(0.0, price, tokens=0), priced(1.0, price, tokens=tokens))
    assert found.cost_per_million_tokens == {"prompt": None, "output": None, "all": None}
    assert found.price_per_hour == (7.2 if price == "7.2" else None)
    assert not any("output tokens" in line for line in drawn([found]))
    unpriced = figures("u", reading(0.0), reading(1.0, tokens=9))
    assert unpriced.price_per_hour is None and unpriced.cost_per_million_tokens["output"] is None


def test_an_idle_server_has_figures_too() -> None:
    same = reading(1.0, steps=5)
    found = figures("u", same, replace(same, taken=2.0))
    assert found.tokens_per_second == 0 and found.ranks[0].saturation == 0
    assert found.ttft_p95 is found.tpot_p95 is found.itl_p95 is None
    empty = figures("u", Reading(taken=0, samples={}), Reading(taken=0, samples={}))
    assert empty.ranks == () and empty.imbalance is None and not empty.ready


def test_a_topology_that_is_not_ours_is_done_without() -> None:
    for topology in ({"replicas": 3}, {"replicas": [[], {"ranks": {}}]}, {"hottest_experts": "all"},
                     {"replicas": [{"replica": 0, "ranks": [None, {"rank": "0", "domain": []}]}]}):  # fmt: skip
        found = figures("u", reading(0.0), reading(1.0, topology, steps=1))
        assert [rank.domain for rank in found.ranks] == [None, None] and found.hottest == ()


def test_a_restart_is_seen() -> None:
    assert restarted(reading(0.0, steps=9, tokens=9), reading(1.0, steps=1, tokens=9))
    assert restarted(reading(0.0, steps=9), Reading(taken=1.0, samples={}))
    assert not restarted(reading(0.0, steps=9), reading(1.0, steps=9))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.floats(0, 1))
def test_quantiles_lie_where_observations_are(counts: list[int], share: float) -> None:
    bounds = [*(0.1 * 2**i for i in range(len(counts) - 1)), math.inf]
    buckets = {bound: float(sum(counts[: i + 1])) for i, bound in enumerate(bounds)}
    found = quantile(buckets, share)
    if not sum(counts):
        assert found is None
        return
    assert found is not None and 0 <= found <= max((b for b in bounds if b < math.inf), default=0)
    below = sum(count for bound, count in zip(bounds, counts, strict=True) if bound <= found)
    assert below <= share * sum(counts) + 1e-9 or found in bounds
    assert quantile({1.0: 5.0, 2.0: 10.0, math.inf: 10.0}, 0.75) == 1.5


def server_figures(num_ranks: int, **more: Any) -> ServerFigures:
    base = figures("http://host:8000", reading(0.0), reading(1.0, steps=5, tokens=10))
    ranks = tuple(replace(base.ranks[0], rank=i, domain=i // 8, saturation=i / num_ranks) for i in range(num_ranks))
    return replace(base, ranks=ranks, **more)


def drawn(servers: list[ServerFigures | Lost], width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(draw(servers, width, height))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (80, 10)])
@pytest.mark.parametrize("num_ranks", [1, 8, 72])
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_what_is_drawn_fits(size: tuple[int, int], num_ranks: int, num_servers: int) -> None:
    long = "x" * 300
    full: dict[str, Any] = {
        "model": long, "hottest": HOTTEST, "link_bytes": {"domain": 1.0, "between": 1.0}, "preemptions": 7,
        "cost_per_million_tokens": {"output": 0.5},
    }  # fmt: skip
    lines = drawn([server_figures(num_ranks, url=f"http://{i}", **full) for i in range(num_servers)], *size)
    assert all(len(line) <= size[0] for line in lines)
    assert len(lines) <= size[1]
    if num_ranks > size[1]:
        assert sum("more at" in line for line in lines) == num_servers


def test_a_rank_is_a_bar_with_its_share_and_verdict() -> None:
    rank = RankFigures(
        replica=0, rank=3, domain=1, components={"routed": 0.5, "kv": 0.25}, saturation=0.75, busy=1.0,
        cache_resident=False, kv_usage=0.95, memory={}, running=2, bound="memory",
    )  # fmt: skip
    [line] = [line for line in drawn([replace(server_figures(1), ranks=(rank,))]) if line.startswith("  0.3 d1")]
    width = 80 - 50
    assert "R" * (width // 2) + "K" * (width // 4) + "·" * (width // 4) in line
    assert " 75%       memory " in line and line.endswith("busy 100% KV  95%")
    assert bar({"routed": 7.0}, 10).plain == "R" * 10 and bar({}, 4).plain == "····"


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_weights_in_a_cache_do_not_hide_the_verdict(size: tuple[int, int]) -> None:
    """On small models the bar means nothing, and what binds them (docs/operations.md: `link`) is to be seen."""
    readings = [reading(taken, steps=int(taken), resident=True) for taken in (1.0, 2.0)]
    lines = drawn([figures("u", *readings)], *size)
    [first] = [line for line in lines if line.startswith("  0.0  ")]
    [second] = [line for line in lines if line.startswith("  0.1  ")]
    assert first.endswith(" cache link      busy  10% KV  50%")
    assert second.endswith(" cache imbalance busy  10% KV  50%")


HOTTEST = tuple({"layer": 60 + i, "expert": 250 + i, "times_mean": 12.34 - i} for i in range(5))


@pytest.mark.parametrize(("size", "shown"), [((80, 24), 3), ((200, 60), 5)])
def test_the_hottest_experts_have_a_line_that_holds_them(size: tuple[int, int], shown: int) -> None:
    busy = server_figures(2, hottest=HOTTEST, imbalance=1.25, running=128, waiting=1000, preemptions=12)
    busy = replace(busy, tokens_per_second=12_345.6, prompt_tokens_per_second=123_456.7, itl_p50=0.4567, itl_p95=12.3,
                   ttft_p50=0.9, ttft_p95=99.9, tpot_p50=0.123, tpot_p95=0.456,
                   link_bytes={"domain": 9.9e8, "between": 8.8e7},
                   cost_per_million_tokens={"output": 0.123})  # fmt: skip
    lines = drawn([busy], *size)
    [line] = [line for line in lines if "hottest" in line]
    names = [f"L{60 + i}/E{250 + i} {12.34 - i:.1f}x" for i in range(shown)]
    assert line.startswith("  imbalance 1.25  hottest " + "  ".join(names))
    assert "  12345.6 tok/s  prompt 123456.7 tok/s  running 128  waiting 1000  preempted 12" in lines
    assert "  TTFT 900ms/99.9s  TPOT 123ms/456ms  ITL 457ms/12.3s (p50/p95)" in lines
    assert "  links 990 MB/s in, 88 MB/s between  0.123 for 1M output tokens" in lines
    bare = drawn([server_figures(2, hottest=({"layer": 3, "expert": 7},), imbalance=None)], *size)
    assert "  hottest L3/E7" in bare and not any("links" in line for line in drawn([server_figures(1, link_bytes={})]))


def test_memory_is_a_line_with_kv_as_a_row_of_its_own() -> None:
    two = replace(server_figures(2), ranks=figures("u", reading(0.0), reading(1.0)).ranks)
    assert "  weights 30K  KV 300K used 3.0M reserved 30M free  exchange 300M  other 33.0G" in drawn([two])
    assert "  memory -" in drawn([replace(two, ranks=tuple(replace(rank, memory={}) for rank in two.ranks))])
    assert [_size(n) for n in (0, 999, 1000, 9949, 9951, 999_499, 999_500, 123e9)] == [
        "0B", "999B", "1.0K", "9.9K", "10K", "999K", "1.0M", "123.0G",
    ]  # fmt: skip


def test_texts_of_a_server_are_shown_as_they_are() -> None:
    assert any("[bold]x[/bold]" in line for line in drawn([server_figures(1, model="[bold]x[/bold]")]))
    assert drawn([Lost("http://gone", "nobody [there]")])[1] == "  nobody [there]"
    steering = server_figures(1, model="\x1b]0;mine\x07\n\x9b2J", ready=False, hottest=({"layer": "\x1b[2J"},))
    lines = drawn([steering])
    assert lines[0].startswith("http://host:8000  NOT READY  ?]0;mine??2J  EP2DP1")
    assert any(line.endswith("hottest L?[2J/ENone") for line in lines)


class Pages:
    """What a small server answers by path: (status, body)."""

    def __init__(self) -> None:
        self.by_path: dict[str, tuple[int, bytes]] = {}
        self.keys: list[str | None] = []


@contextmanager
def small_server(pages: Pages) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages.keys.append(self.headers.get("Authorization"))
            status, body = pages.by_path.get(self.path, (404, b"{}"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_advice_is_a_line_once_there_is_one() -> None:
    said = {"number": 3, "verdict": "change", "advised": "EP4DP1[adp=4,atp=1,red=0]", "reason": "it halves bytes"}
    first = reading(0.0)
    for answer, line in (
        (said, "change to EP4DP1: it halves bytes"), (said | {"verdict": "stay"}, "stay: it halves bytes"),
        (said | {"number": 0}, ""), ({"verdict": 1}, ""), ({}, ""),
    ):  # fmt: skip
        found = figures("u", first, replace(reading(1.0), advice=answer))
        assert found.advice == line
        assert any(text.startswith(f"  advice {line}") for text in drawn([found])) == bool(line)


def test_a_server_that_goes_and_comes_back_is_followed() -> None:
    pages = Pages()
    with small_server(pages) as url:
        server = Server(url, {})
        pages.by_path["/metrics"] = (200, metrics(steps=5).encode())
        server.read()
        assert isinstance(server.shown(), Lost)
        pages.by_path["/metrics"] = (200, metrics(steps=6).encode())
        server.read()
        assert isinstance(server.shown(), ServerFigures)
        pages.by_path["/metrics"] = (503, b"")
        server.read()
        lost = server.shown()
        assert isinstance(lost, Lost) and lost.reason == f"{url}/metrics answers 503"
        pages.by_path["/metrics"] = (200, metrics(steps=1).encode())  # another life
        server.read()
        assert isinstance(server.shown(), Lost)
        pages.by_path["/metrics"] = (200, metrics(steps=2, tokens=4).encode())
        server.read()
        again = server.shown()
    assert isinstance(again, ServerFigures) and again.tokens_per_second > 0
    server.read()
    gone = server.shown()
    assert isinstance(gone, Lost) and "refused; is a server running there?" in gone.reason


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, b"", "answers 401; give --api-key"),
        (200, b"<html>", "is no metrics"),
        (200, b"\xff\xfe", "is no metrics"),
        (200, b"other_metric 1\n", "has no moewe_info"),
        (200, b"# " + b"x" * (17 << 20), "answers more than 16 MiB"),
    ],
)
def test_what_is_no_server_of_ours_is_one_line(status: int, body: bytes, reason: str) -> None:
    pages = Pages()
    pages.by_path["/metrics"] = (status, body)
    with small_server(pages) as url, pytest.raises(NoAnswerError) as error:
        read_server(url, {})
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_once_prints_json_and_says_by_its_code_whether_all_answered(capsys: pytest.CaptureFixture[str]) -> None:
    pages = Pages()
    pages.by_path = {
        "/metrics": (200, metrics(steps=5).encode()),
        "/v1/topology": (200, json.dumps({**TOPOLOGY, "hottest_experts": [{"layer": 1, "expert": 7}]}).encode()),
    }
    with small_server(pages) as url:
        tool = {"url": (url, url + "/v1"), "once": True, "json": True, "interval": 0.2, "api_key": "secret"}
        assert top(tool) == 0
        shown = json.loads(capsys.readouterr().out)
        assert top({**tool, "json": False}) == 0
        assert "hottest L1/E7" in capsys.readouterr().out
    assert [row["url"] for row in shown] == [url, url] and shown[0]["ranks"][1]["domain"] == 1
    assert set(pages.keys) == {"Bearer secret"}
    assert top(tool) == 1
    assert "refused" in json.loads(capsys.readouterr().out)[0]["error"]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"interval": 0.1}, "--interval 0.1 is not allowed; use at least 0.2"),
        ({"interval": math.nan}, "--interval nan is not allowed"),
        ({"json": True}, "--json prints one reading; add --once"),
        ({"url": ("ftp://x",), "once": True}, "URL 'ftp://x' is no URL"),
        ({"url": ("http://a b",), "once": True}, "URL 'http://a b' is no URL"),
        ({}, "stdout is no terminal; use --once"),
    ],
)
def test_mistakes_are_named(tool: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        top(tool)
    assert message in str(error.value)
