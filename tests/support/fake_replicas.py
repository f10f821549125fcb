"""A stand-in for ReplicaSet that says scripted tokens, and a real HTTP server over it inside the test's event loop.

Not an engine: no scheduling, no limits. Text comes from the real TextOutput, HTTP from the real application.
Units: token ids; `pause` is seconds between tokens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import msgspec
import uvicorn
from starlette.types import ASGIApp

from moewe.models.config import ModelConfig, MoEConfig, RotaryConfig
from moewe.moe.routing import RoutingConfig
from moewe.runtime.config import EngineConfig, ModelOptions, ParallelOptions
from moewe.runtime.generation_defaults import GenerationDefaults
from moewe.runtime.messages import Delta, LogprobEntry, Ready, Stats
from moewe.runtime.metrics.export import Metrics
from moewe.runtime.metrics.stats import encode_counters, rank_stats
from moewe.runtime.params import SamplingParams
from moewe.runtime.plan import unpack
from moewe.runtime.rank_stats import RankStats
from moewe.runtime.text_output import TextOutput
from moewe.server.http.app import build_app
from moewe.server.http.serve import http_config
from moewe.server.hub import Hub
from moewe.server.options import ServerOptions
from moewe.server.state import Phase, ServerState
from moewe.telemetry import RankCounters
from moewe.text import ChatTemplate, Tokenizer
from tests.support.small_tokenizers import byte_level

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 512
Script = Callable[[Sequence[int]], Sequence[int]]


class FakeReplicas:
    """Answers each prompt with `script(prompt)`, its last token an end token when `ends`."""

    def __init__(self, tokenizer: Tokenizer | None, script: Script, *, pause: float = 0.0, ends: bool = False) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.pause = pause
        self.ends = ends
        self.on_deltas: Callable[[Sequence[Delta]], None] = lambda deltas: None
        self.submitted: dict[str, tuple[list[int], SamplingParams, int]] = {}
        self.aborted: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def submit(self, request_id: str, prompt: bytes, params: SamplingParams, priority: int = 0) -> None:
        token_ids = unpack(prompt).tolist()
        self.submitted[request_id] = (token_ids, params, priority)
        self._tasks[request_id] = asyncio.ensure_future(self._say(request_id, token_ids, params))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def stats(self) -> list[Stats]:
        ranks: tuple[RankStats, ...] = tuple(
            rank_stats(rank, encode_counters(RankCounters(1, 2)), used_blocks=self.num_running, total_blocks=8)
            for rank in range(2)
        )
        return [Stats(num_running=self.num_running, num_waiting=0, num_preemptions=0, num_steps=0, ranks=ranks,
                      running_per_rank=(self.num_running, 0))]  # fmt: skip

    async def _say(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        output = TextOutput(self.tokenizer, params)
        tokens = list(self.script(prompt))
        await asyncio.sleep(self.pause)
        for piece in self._on_prompt(prompt, params):
            self._tell(Delta(request_id=request_id, prompt_logprobs=piece, first_scheduled=time.monotonic()))
        if params.max_tokens == 0:
            del self._tasks[request_id]
            self._tell(Delta(request_id=request_id, finish_reason="length", first_scheduled=time.monotonic()))
            return
        for position, token in enumerate(tokens):
            await asyncio.sleep(self.pause)
            reason = None
            if position == len(tokens) - 1:
                reason = "stop" if self.ends else "length"
            elif params.max_tokens is not None and position + 1 >= params.max_tokens:
                reason = "length"
            text, stopped, _ = output.add([token], reason)
            reason = "stop" if stopped else reason
            if reason is not None:
                del self._tasks[request_id]
            self._tell(Delta(request_id=request_id, token_ids=(token,), text=text, finish_reason=reason,
                             logprobs=self._logprobs(token, params), first_scheduled=time.monotonic()))  # fmt: skip
            if reason is not None:
                return

    def _tell(self, delta: Delta) -> None:
        self.on_deltas((delta,))

    def _on_prompt(self, prompt: Sequence[int], params: SamplingParams) -> list[tuple[tuple[LogprobEntry, ...], ...]]:
        """What is said of the tokens of a prompt, in two pieces."""
        if params.prompt_logprobs is None:
            return []
        asked = msgspec.structs.replace(params, logprobs=params.prompt_logprobs)
        positions = ((), *(self._logprobs(token, asked)[0] for token in prompt[1:]))
        return [positions[:2], positions[2:]]

    def _logprobs(self, token: int, params: SamplingParams) -> tuple[tuple[LogprobEntry, ...], ...]:
        if params.logprobs is None:
            return ()
        entries = [LogprobEntry(token_id=token, logprob=-0.5, rank=2, decoded_token=None)]
        for i in range(params.logprobs):
            logprob = float("-inf") if i else -0.25
            entries.append(
                LogprobEntry(token_id=(token + 1 + i) % 256, logprob=logprob, rank=1 + 2 * i, decoded_token=None)
            )
        return (tuple(entries),)


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})


@cache
def says(text: str) -> Script:
    tokens = tokenizer().encode(text, add_special_tokens=False)
    return lambda prompt: tokens


def model_config() -> ModelConfig:
    routing = RoutingConfig(num_experts=4, top_k=2, scoring="softmax", renormalize=True)
    return ModelConfig(
        family="mixtral", num_layers=2, hidden_size=8, vocab_size=VOCAB_SIZE, num_heads=2, num_kv_heads=1, head_dim=4,
        attention_scale=0.5, dense_width=8, rotary=RotaryConfig(theta=1e4, rotary_dim=4), norm_eps=1e-5,
        max_position_embeddings=4096, dtype="float32", moe_layers=(0, 1),
        moe=MoEConfig(routing=routing, expert_width=8),
    )  # fmt: skip


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, variables={"bos_token": "<s>"})


def make_state(
    replicas: FakeReplicas | None = None,
    *,
    template: str | None = CHATML,
    max_model_len: int = 64,
    defaults: dict[str, Any] | None = None,
    **options: Any,
) -> ServerState:
    tokens = replicas.tokenizer if replicas is not None else tokenizer()
    metrics = Metrics(version="0", model="gull", topology="EP2DP1")
    state = ServerState(
        config=EngineConfig(
            model=ModelOptions(model="gull", path="gull"),
            parallel=ParallelOptions(topology="EP2DP1[adp=2,atp=1,red=0]"),
        ),
        options=ServerOptions(**{"served_model_name": ("gull", "moewe"), **options}),
        model_config=model_config(),
        tokenizer=tokens,
        template=None if template is None else compiled(template),
        defaults=GenerationDefaults(sampling=defaults or {}),
        metrics=metrics,
        hub=Hub(metrics, most_live=100),
        started=1,
    )
    if replicas is not None:
        state.hub.replicas = replicas
        replicas.on_deltas = state.hub.on_deltas
        state.latest_stats = replicas.stats
        state.ready = [
            Ready(num_blocks=max_model_len // 16, block_size=16, max_model_len=max_model_len, max_num_seqs=8,
                  memory_bandwidth=(1e9, 1e9), weight_bytes=(5, 6), weight_bytes_read=(5, 6), pids=(11, 12))
        ]  # fmt: skip
        metrics.set_ready(0, state.ready[0])
        state.enter(Phase.READY)
    return state


@asynccontextmanager
async def served(state: ServerState, verify: Any = False) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `state` over HTTP or HTTPS on a free port and give a client to it.

    Without `verify` the client reads no certificates of the world, which takes it longer than most tests.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    config = http_config(state)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server._serve([listener]))
    scheme = "http" if state.options.ssl_certfile is None else "https"
    url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=verify) as client:
            yield client
    finally:
        server.should_exit = True
        await task


_latest: list[tuple[ServerState, ASGIApp]] = []


def app_over(state: ServerState) -> ASGIApp:
    """Return the application over `state`, the one of before if it was asked last: making one takes 20 ms."""
    if not _latest or _latest[0][0] is not state:
        _latest[:] = [(state, build_app(state))]
    return _latest[0][1]


def ask(state: ServerState, method: str, path: str, **kwargs: Any) -> httpx.Response:
    """Return the answer of the application to one request, without a network."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app_over(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://moewe", timeout=20) as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(run())


def with_server(
    state: ServerState, body: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], verify: Any = False
) -> Any:
    """Run `body(client)` against a server over `state`."""

    async def run() -> Any:
        async with served(state, verify) as client:
            return await body(client)

    return asyncio.run(run())


async def connect(client: httpx.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a bare connection to the server that `client` asks."""
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


def on_the_wire(body: dict[str, Any]) -> bytes:
    """Return a request for a completion as it goes over a bare connection."""
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(data) + data
