"""What users get of a layout: time to the first token, time between tokens, and rates, for a workload.

Not a simulation: steady means, by Little's law (1961) between steps (step_time.py) and requests. Prompts queue as
customers of m equal servers with random arrivals and fixed service (Sakasegawa, 1977).
Units: seconds, tokens, requests; rates a second over the whole deployment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..spec import Topology, TopologyError
from .step_time import Rows, Setting, StepTime, step_time

# Prompts that arrive at random never fill their servers: beyond this part of them requests wait at the door.
MOST_BUSY = 0.95
_BISECTIONS = 30
_KEYS = ("isl", "osl", "concurrency", "hit", "drafts", "acceptance")
_WHOLE = ("isl", "osl", "concurrency", "drafts")
_MOST = 1e9


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are all alike; as many are in the system as users wait for.

    Attributes:
        isl, osl: tokens of a prompt and of its answer.
        concurrency: requests in the system, over all replicas.
        hit: part of a prompt that a prefix cache holds already.
        drafts: tokens that a draft head proposes a step (MTP).
        acceptance: chance that one of them is right, given that those before it are.
    """

    isl: int = 4096
    osl: int = 1024
    concurrency: int = 256
    hit: float = 0.0
    drafts: int = 0
    acceptance: float = 0.85

    @property
    def new_tokens(self) -> float:
        """Tokens of a prompt that have to be computed."""
        return max(1.0, self.isl * (1 - self.hit))

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a sequence commits in a step: (1 - a ** (d + 1)) / (1 - a) (Leviathan et al., 2023, eq. 1)."""
        if self.acceptance >= 1:
            return 1.0 + self.drafts
        return float((1 - self.acceptance ** (self.drafts + 1)) / (1 - self.acceptance))

    @property
    def context(self) -> float:
        """Tokens in KV of a sequence that decodes, on average."""
        return self.isl + self.osl / 2


def parse_workload(text: str) -> Workload:
    """Return what `isl=4096,osl=1024,concurrency=256` means; what is left out has its default.

    Raises:
        TopologyError: one line with the key, the value and the fix.
    """
    values: dict[str, float] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, number = (part.strip() for part in item.partition("="))
        if not equals or key not in _KEYS:
            raise TopologyError(f"workload {text!r} has {item!r}; write keys like isl=4096, known are "
                                f"{', '.join(_KEYS)}")  # fmt: skip
        if key in values:
            raise TopologyError(f"workload {text!r} gives {key} twice; give it once")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        most, least = (1.0, 0.0) if key in ("hit", "acceptance") else (_MOST, 0.0 if key == "drafts" else 1.0)
        if not least <= value <= most or (key in _WHOLE and value != int(value)):
            kind = "a whole number" if key in _WHOLE else "a number"
            raise TopologyError(f"workload {text!r}: {key}={number} must be {kind} from {least:g} to {most:g}")
        values[key] = value
    return Workload(**{key: int(value) if key in _WHOLE else value for key, value in values.items()})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Ranks that do one thing.

    Attributes:
        setting: model, layout and machine.
        chunk: most rows of prompts in a step on an attention replica.
        most_sequences: that fit the KV of an attention replica.
    """

    setting: Setting
    chunk: int
    most_sequences: int

    @property
    def topology(self) -> Topology:
        """Its layout."""
        return self.setting.topology

    @property
    def servers(self) -> int:
        """Attention replicas of all replicas, each with requests of its own."""
        return self.topology.adp * self.topology.dp


@dataclass(frozen=True, kw_only=True)
class Served:
    """What users get.

    Attributes:
        ttft, tpot: means.
        waiting: part of `ttft` in which nothing is computed for the request.
        batch: sequences that decode on each attention replica.
        chunk: rows of prompts that run beside them.
        requests: a second.
        step: a decode step at that batch.
        num_gpus, decode_gpus: all, and those that decode.
        limit: what keeps it from more: `concurrency`, `prefill`, or `kv`.
        workload: see there.
    """

    ttft: float
    tpot: float
    waiting: float
    batch: float
    chunk: float
    requests: float
    step: StepTime
    num_gpus: int
    decode_gpus: int
    limit: str
    workload: Workload

    @property
    def user_rate(self) -> float:
        """Output tokens a second that a user sees while an answer comes."""
        return 1 / self.tpot

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.requests * self.workload.osl

    @property
    def total_rate(self) -> float:
        """Input tokens, those from a prefix cache included, and output tokens, a second."""
        return self.requests * (self.workload.isl + self.workload.osl)


def decode_rows(workload: Workload, batch: float, chunk: float = 0.0) -> Rows:
    """Return the rows of a step in which `batch` sequences decode beside `chunk` rows of prompts."""
    return Rows(
        decodes=batch,
        context=workload.context,
        queries=1 + workload.drafts,
        chunk=chunk,
        chunk_context=workload.isl * workload.hit + workload.new_tokens / 2,
    )


def decode_step(setting: Setting, workload: Workload, batch: float, chunk: float = 0.0) -> StepTime:
    """Return a decode step; each draft costs a layer more (DeepSeek-V3's MTP module is one), without launches."""
    step = step_time(setting, decode_rows(workload, batch, chunk))
    if not workload.drafts:
        return step
    share = workload.drafts / setting.model.footprint.num_layers / (1 + workload.drafts)
    spent, computing = step.seconds * share, step.computing * share
    drafts = replace(step.parts[0], name="drafts", num_bytes=0, flops=0, seconds=spent, computing=computing)
    return replace(step, parts=(*step.parts, drafts))


def serve(decode: Pool, workload: Workload, prefill: Pool | None = None) -> Served:
    """Return what users get of one pool, or of separate pools for prompts and for decoding.

    The batch is the largest at which no more requests are in the system than the workload has, prompts are not more
    than their servers can take, and KV holds; the rest of the requests waits.
    """
    apart = None if prefill is None else prompts_of(prefill, workload)
    most = min(workload.concurrency / decode.servers, decode.most_sequences)
    assert most > 0, "what holds no sequence is refused before"
    low, high = 0.0, float(most)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _fits(decode, workload, apart, middle):
            low = middle
        else:
            high = middle
    batch = max(low, 1e-9 * most)
    at = state_at(decode, workload, apart, batch)
    in_system = workload.concurrency / at.requests
    ttft = max(at.ttft, in_system - workload.osl * at.tpot)
    limit = "concurrency"
    if ttft > at.ttft * 1.02:
        limit = "kv" if batch > 0.999 * decode.most_sequences else "prefill"
    elif at.busy > 0.999 * MOST_BUSY:
        limit = "prefill"
    num_gpus = decode.topology.num_ranks + (prefill.topology.num_ranks if prefill is not None else 0)
    return Served(
        ttft=ttft,
        tpot=at.tpot,
        waiting=at.waiting + ttft - at.ttft,
        batch=batch,
        chunk=at.chunk,
        requests=at.requests,
        step=at.step,
        num_gpus=num_gpus,
        decode_gpus=decode.topology.num_ranks,
        limit=limit,
        workload=workload,
    )


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What a pool does with prompts.

    Attributes:
        service: seconds of one on an attention replica.
        capacity: prompts a second of the pool.
        transfer: seconds until its KV is where it decodes.
        servers: attention replicas of the pool.
    """

    service: float
    capacity: float
    transfer: float
    servers: int

    def times(self, number: int) -> Prompts:
        """Return the same for so many times the groups."""
        return replace(self, capacity=self.capacity * number, servers=self.servers * number)


def prompts_of(pool: Pool, workload: Workload) -> Prompts:
    """Return what `pool` does with prompts of `workload`."""
    service, capacity = prefill_service(pool, workload)
    return Prompts(service=service, capacity=capacity, transfer=transfer_seconds(pool, workload), servers=pool.servers)


@dataclass(frozen=True, kw_only=True)
class State:
    """What goes on while so many sequences decode; `busy` is the part of prompts that servers can take."""

    ttft: float
    tpot: float
    waiting: float
    requests: float
    busy: float
    chunk: float
    step: StepTime


def _fits(decode: Pool, workload: Workload, prompts: Prompts | None, batch: float) -> bool:
    state = state_at(decode, workload, prompts, batch)
    return state.busy <= MOST_BUSY and state.requests * (state.ttft + workload.osl * state.tpot) <= workload.concurrency


def state_at(decode: Pool, workload: Workload, prompts: Prompts | None, batch: float) -> State:
    """Return the state in which `batch` sequences decode on each attention replica.

    Without a pool for prompts they come as fast as answers end: a step of b sequences takes b * new / osl rows of them.
    """
    if prompts is not None:
        return state_apart(decode_step(decode.setting, workload, batch), decode.servers, workload, prompts, batch)
    rows = batch * workload.new_tokens * workload.tokens_a_step / workload.osl
    chunk = min(rows, decode.chunk)
    step = decode_step(decode.setting, workload, batch, chunk)
    # A new prompt fills the steps it runs in.
    full = decode_step(decode.setting, workload, batch, min(decode.chunk, workload.new_tokens))
    service = full.seconds * math.ceil(workload.new_tokens / decode.chunk)
    tpot, busy = step.seconds / workload.tokens_a_step, rows / decode.chunk
    waiting = queue_seconds(min(busy, MOST_BUSY), decode.servers, service)
    return State(
        ttft=waiting + service,
        tpot=tpot,
        waiting=waiting,
        requests=decode.servers * batch / (workload.osl * tpot),
        busy=busy,
        chunk=chunk,
        step=step,
    )


def state_apart(step: StepTime, servers: int, workload: Workload, prompts: Prompts, batch: float) -> State:
    """Return the state in which a decode step of `batch` sequences takes `step` on each of `servers`, fed by others."""
    tpot = step.seconds / workload.tokens_a_step
    requests = servers * batch / (workload.osl * tpot)
    busy = requests / prompts.capacity
    waiting = queue_seconds(min(busy, MOST_BUSY), prompts.servers, prompts.service)
    return State(
        ttft=waiting + prompts.service + prompts.transfer,
        tpot=tpot,
        waiting=waiting,
        requests=requests,
        busy=busy,
        chunk=0.0,
        step=step,
    )


def prefill_service(pool: Pool, workload: Workload) -> tuple[float, float]:
    """Return the seconds of one prompt on an attention replica, and the prompts a second of the pool.

    A prompt longer than a chunk runs in several steps; shorter ones share a step.
    """
    context = workload.isl * workload.hit + workload.new_tokens / 2
    steps = math.ceil(workload.new_tokens / pool.chunk)
    rows = workload.new_tokens / steps if steps > 1 else pool.chunk
    seconds = step_time(pool.setting, Rows(chunk=rows, chunk_context=context)).seconds
    alone = seconds * steps
    return alone, pool.servers * rows / seconds / workload.new_tokens


def transfer_seconds(prefill: Pool, workload: Workload) -> float:
    """Return how long KV of a prompt takes to the pool that decodes, over the slow link."""
    groups = prefill.setting.model.footprint.kv_groups
    num_bytes = sum(min(workload.isl, group.window or workload.isl) * group.bytes_per_token for group in groups)
    return num_bytes / (prefill.setting.hardware.scale_out_bandwidth * prefill.topology.atp)


def queue_seconds(busy: float, servers: int, service: float) -> float:
    """Return the mean wait before `servers` servers that are `busy` (0 to 1) of the time and take `service` each.

    M/D/m by Sakasegawa: busy ** (sqrt(2 (m + 1)) - 1) / (m (1 - busy)) * service / 2, which is exact for m = 1
    (Pollaczek, Khinchine).

    Example:
        >>> queue_seconds(0.5, 1, 2.0)
        1.0
    """
    return float(busy ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)) * service / 2)
