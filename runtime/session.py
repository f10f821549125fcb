"""A model that runs for this process alone: prompts in, deltas out; what `LLM` and the terminal stand on.

Not a server (server/http/serve.py attaches to replicas by itself) and not an engine. One thread at a time.
Units: token ids, seconds.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import msgspec

from ..models.source import resolve_model
from ..text import ChatTemplate, Tokenizer, check_template_kwargs
from .checked_params import checked_params
from .config import EngineConfig
from .generation_defaults import GenerationDefaults, generation_defaults
from .kernels import prepare_kernels
from .kv_layout import scheduler_limits
from .launcher import OnLoading
from .messages import INVALID_GRAMMAR, INVALID_REQUEST, Delta
from .params import SamplingParams
from .processes.group import GroupParts
from .prompts import check_token_ids, model_template, model_tokenizer, packed, with_ends
from .replicas import ReplicaLost, ReplicaSet
from .resolve import Resolved, check_checkpoint, resolve
from .scheduling.admission import check_fits
from .scheduling.limits import SchedulerConfig

log = logging.getLogger(__name__)

POLL_S = 1.0
# Idle engines tell their statistics each second.
STATS_S = 5.0


class EngineLostError(RuntimeError):
    """A rank or an engine ended; nothing more can be generated.

    Args:
        reason: one line.
        exit_code: for a command line: 1 when it never was ready, 3 when it was lost later.
    """

    def __init__(self, reason: str, exit_code: int = 3) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def locate(config: EngineConfig, *, on_progress: Callable[[str, int, int], None] | None = None) -> EngineConfig:
    """Return `config` with the folders that its model and tokenizer resolved to, downloading them if need be.

    Raises:
        ValueError: there is no such model or tokenizer.
    """
    model, tokenizer = config.model, config.model.tokenizer
    if tokenizer is not None and tokenizer != model.model:
        tokenizer = str(resolve_model(tokenizer, what="tokenizer", on_progress=on_progress))
    path = resolve_model(model.model, revision=model.revision, on_progress=on_progress)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(model, path=str(path), tokenizer=tokenizer))


class Session:
    """Replicas that are started and ready, with the model's tokenizer. Use `start`.

    Attributes:
        resolved: what is running.
        tokenizer: None when started with `skip_tokenizer_init`.
        defaults: sampling where nobody said otherwise.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        resolved: Resolved,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        defaults: GenerationDefaults,
    ) -> None:
        self._replicas = replicas
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of a call, from its first prompt to its last token
        self._turn = threading.Lock()  # of the replicas: `close` may come from another thread
        self._closed = False
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._template = template

    @classmethod
    def start(
        cls, config: EngineConfig, *, on_loading: OnLoading | None = None, parts: GroupParts | None = None
    ) -> Session:
        """Start all replicas and wait until they are ready.

        Args:
            config: with the model's folder, see `locate`.
            on_loading: told (replica, report of a rank) as weights load.
            parts: what ranks are made of, where they are threads.

        Raises:
            ValueError: something that the user can mend.
            EngineLostError: a rank or an engine ended while starting.
        """
        resolved = resolve(config)
        check_checkpoint(resolved)
        defaults = generation_defaults(config.model)
        tokenizer = model_tokenizer(config.model)
        template = model_template(config.model, tokenizer)
        resolved = with_ends(resolved, tokenizer, defaults.end_token_ids)
        defaults.report()
        prepare_kernels(config)
        replicas = ReplicaSet.start(resolved, on_loading=on_loading, parts=parts)
        session = cls(replicas, resolved, tokenizer, template, defaults)
        try:
            replicas.wait_ready()
        except ReplicaLost as lost:
            session.close()
            raise EngineLostError(str(lost), exit_code=1) from lost
        except BaseException:
            session.close()
            raise
        return session

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return min(ready.max_model_len for ready in self._replicas.ready)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        return self._need_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the prompt of a conversation, by the chat template in use.

        Args:
            messages: the turns.
            kwargs: further variables of the template (`chat_template_kwargs`).

        Raises:
            ValueError: the model has no template, or it refuses the messages; or `kwargs` are not plain JSON.
        """
        self._need_tokenizer()
        if self._template is None:
            raise ValueError(
                f"model {self.resolved.config.model.model!r} has no chat template; use generate instead of chat, "
                "or give one as chat_template"
            )
        return self._template.render(messages, **check_template_kwargs(kwargs or {}))

    def params(
        self, prompt: Sequence[int], given: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Return how to continue `prompt`: as `given`, else by the model's defaults, else as `otherwise`."""
        return self.defaults.params(given, otherwise=otherwise, room=self.max_model_len - len(prompt))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("skip_tokenizer_init=True leaves token ids only; give prompt_token_ids")
        return self.tokenizer

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Refuse what can never run, by the rules of the scheduler and the figures of the replicas.

        Returns:
            `params` as engines take them (see `checked_params`).

        Raises:
            ValueError: the prompt is empty, too long, or holds an id that is no token; or the parameters ask for more
                than there is.
        """
        check_fits(len(token_ids), params.max_tokens, self._limits)
        check_token_ids(token_ids, self.resolved.model.vocab_size)
        return checked_params(params, self.tokenizer, self.resolved.model.vocab_size)

    @cached_property
    def _limits(self) -> SchedulerConfig:
        """What every replica takes, whichever will be chosen."""
        return scheduler_limits(
            self.resolved.config,
            self.resolved.footprint.kv_groups,
            num_blocks=min(one.num_blocks for one in self._replicas.ready),
        )

    def stream(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Iterator[tuple[int, Delta]]:
        """Yield (index of the output, what became known of it) until all are finished.

        Outputs are numbered through: all of the first prompt, as many as its `n`, then those of the next.

        Leaving the iterator early aborts what still runs.

        Raises:
            ValueError: a prompt that can never run as its parameters ask; nothing is submitted then.
            EngineLostError: a rank or an engine ended, or the session was closed meanwhile.
            RuntimeError: it is closed, or another call runs.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed; make a new one")
        checked = [(self.check(prompt, own), packed(prompt)) for prompt, own in zip(prompts, params, strict=True)]
        outputs = [(prompt, choice) for own, prompt in checked for choice in own.choices()]
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this LLM is generating already; it serves one call at a time (a server serves many)")
        pending: dict[str, int] = {}
        try:
            yield from self._run(outputs, pending)
        finally:
            if not self._closed:  # `close` ends them all, and is not waited for here
                with self._turn:
                    for request_id in pending:
                        self._replicas.abort(request_id)
            self._lock.release()

    def _run(
        self, outputs: Sequence[tuple[bytes, SamplingParams]], pending: dict[str, int]
    ) -> Iterator[tuple[int, Delta]]:
        waiting = iter(range(len(outputs)))
        most = self.resolved.topology.dp * self.resolved.most_requests  # replicas refuse more than that
        while True:
            self._need_open()  # before the turn too, which `close` may hold for seconds
            with self._turn:
                self._need_open()
                for index in itertools.islice(waiting, most - len(pending)):
                    request_id = f"local-{next(self._numbers)}"
                    pending[request_id] = index
                    self._submit(request_id, *outputs[index])
                deltas = self._replicas.poll(POLL_S) if pending else []
            if not pending:
                return
            for delta in deltas:
                if delta.request_id not in pending:
                    continue  # of a call that was left early
                self._need_open()
                index = pending[delta.request_id]
                if delta.finish_reason is not None:
                    del pending[delta.request_id]
                if delta.finish_reason == "error":
                    self._raise_for(delta)
                yield index, delta

    def num_preemptions(self) -> int:
        """Return how often requests were put back for lack of blocks since the start; waits until engines are idle."""
        old, deadline = self._replicas.stats(), time.monotonic() + STATS_S
        while True:
            with self._turn:
                self._need_open()
                self._replicas.poll(POLL_S / 10)  # of calls that were left early
                new = self._replicas.stats()
            fresh = all(
                mine is not before and not mine.num_running + mine.num_waiting
                for mine, before in zip(new, old, strict=True)
            )
            if fresh or time.monotonic() > deadline:
                return sum(stats.num_preemptions for stats in new)

    def _need_open(self) -> None:
        if self._closed:
            raise EngineLostError("this LLM was closed while it generated")

    def _raise_for(self, delta: Delta) -> None:
        """Raise for an error that is not of this one request's making (numbers that are not finite stay its result)."""
        if self._replicas.failure is not None:
            raise EngineLostError(self._replicas.failure.reason)
        if delta.error_code in (INVALID_REQUEST, INVALID_GRAMMAR):
            raise ValueError(delta.error or "the engine refused the request")

    def _submit(self, request_id: str, prompt: bytes, params: SamplingParams) -> None:
        try:
            self._replicas.submit(request_id, prompt, params)
        except ReplicaLost as lost:
            raise EngineLostError(str(lost)) from lost

    def close(self) -> None:
        """End all engines and ranks; safe to call twice and from any thread: a running call raises EngineLostError."""
        if not self._closed:
            self._closed = True
            free = self._turn.acquire(timeout=2 * POLL_S)
            try:
                self._replicas.close()
            finally:
                if free:
                    self._turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
