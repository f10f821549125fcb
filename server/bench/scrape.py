"""What a server tells about itself beside its answers: version, model, topology, preemptions, memory.

Not the load. Everything here is optional: a server that lacks a route is asked once and then let be.
Units: bytes, preemptions, ratios.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    import aiohttp

INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 3.0
FACTS_TIMEOUT_S = 15.0  # a busy server may be slow to answer
# Sums over all labels; the first name that a server has counts.
PREEMPTIONS = ("moewe_preemptions_total", "vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
MEMORY = ("moewe_peak_memory_bytes", "process_resident_memory_bytes")
WEIGHTS = ("moewe_weight_kind_bytes",)
# The greatest over all labels.
KV_USAGE = ("moewe_kv_usage_ratio", "vllm:kv_cache_usage_perc", "sglang:token_usage")
_TOPOLOGY_KEYS = ("topology", "ep", "dp", "num_ranks", "device", "model", "num_experts", "num_moe_layers")


class Samples:
    """The values of one scrape of /metrics, by name."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._values.setdefault(sample.name, []).append(sample.value)

    def values(self, names: Iterable[str]) -> list[float] | None:
        """Return the values of the first of `names` that is there."""
        return next((self._values[name] for name in names if name in self._values), None)

    def total(self, names: Iterable[str]) -> float | None:
        """Return the sum over all labels."""
        values = self.values(names)
        return None if values is None else sum(values)


class Peaks:
    """The greatest values of what was scraped, and how many preemptions there were meanwhile."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._figures: dict[str, float] = {}

    def add(self, samples: Samples) -> None:
        """Take a scrape; the first one is what preemptions count from."""
        preemptions = samples.total(PREEMPTIONS)
        if preemptions is not None:
            self._first = preemptions if self._first is None else self._first
            self._raise("preemptions", preemptions - self._first)
        self._raise("peak_memory_bytes", samples.total(MEMORY))
        self._raise("weight_bytes", samples.total(WEIGHTS))
        usage = samples.values(KV_USAGE)
        self._raise("peak_kv_usage", max(usage) if usage else None)

    def _raise(self, name: str, value: float | None) -> None:
        if value is not None:
            self._figures[name] = max(value, self._figures.get(name, value))

    def figures(self) -> dict[str, float]:
        """Return what is known: `preemptions`, `peak_memory_bytes`, `weight_bytes`, `peak_kv_usage`."""
        return dict(self._figures)


class Watch:
    """Scrapes /metrics at the start, every second and at the end, as an async context; silent where there is none.

    Args:
        session: with the headers of the run.
        root: of the server, without /v1.
    """

    def __init__(self, session: aiohttp.ClientSession, root: str) -> None:
        self.peaks = Peaks()
        self._session = session
        self._url = f"{root}/metrics"
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        if await self._scrape():
            self._task = asyncio.ensure_future(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._scrape()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._scrape()

    async def _scrape(self) -> bool:
        text = await _get(self._session, self._url, SCRAPE_TIMEOUT_S)
        if text is None:
            return False
        try:
            self.peaks.add(Samples(text))
        except ValueError:
            return False
        return True


async def server_facts(session: aiohttp.ClientSession, root: str, api: str) -> dict[str, Any]:
    """Return what makes numbers comparable: `version`, `models`, `max_model_len`, `topology`, as far as told.

    Args:
        root: of the server.
        api: its OpenAI part, ending in /v1.
    """
    version, models, topology = await asyncio.gather(
        *(_get_json(session, url) for url in (f"{root}/version", f"{api}/models", f"{api}/topology"))
    )
    facts: dict[str, Any] = {}
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        facts["version"] = version["version"]
    cards = models.get("data") if isinstance(models, dict) else None
    cards = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if cards:
        facts["models"] = [card["id"] for card in cards]
        facts |= {key: cards[0][key] for key in ("max_model_len", "owned_by") if cards[0].get(key) is not None}
    if isinstance(topology, dict) and "topology" in topology:
        facts["topology"] = {key: topology[key] for key in _TOPOLOGY_KEYS if key in topology}
    return facts


async def _get_json(session: aiohttp.ClientSession, url: str) -> Any:
    text = await _get(session, url, FACTS_TIMEOUT_S)
    with suppress(msgspec.DecodeError):
        return None if text is None else msgspec.json.decode(text)
    return None


async def _get(session: aiohttp.ClientSession, url: str, timeout: float) -> str | None:
    import aiohttp

    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return None
