"""A model that runs for this process alone: prompts in, deltas out; what `LLM` and the terminal stand on.

Not a server (server/serve.py attaches to replicas by itself) and not an engine. One thread at a time.
Units: token ids, seconds.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from ..models.source import resolve_model
from ..text import Tokenizer
from .config import EngineConfig
from .messages import Delta
from .params import SamplingParams
from .prompts import check_token_ids, model_tokenizer
from .replicas import OnLoading, ReplicaLost, ReplicaSet
from .resolve import Resolved, check_checkpoint, resolve

log = logging.getLogger(__name__)

POLL_S = 1.0


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
    """Return `config` with the folder that its model resolved to, downloading it if need be."""
    path = resolve_model(config.model.model, revision=config.model.revision, on_progress=on_progress)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(path)))


class Session:
    """Replicas that are started and ready, with the model's tokenizer. Use `start`.

    Attributes:
        resolved: what is running.
        tokenizer: None when started with `skip_tokenizer_init`.
    """

    def __init__(self, replicas: ReplicaSet, resolved: Resolved, tokenizer: Tokenizer | None) -> None:
        self._replicas = replicas
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self.resolved = resolved
        self.tokenizer = tokenizer

    @classmethod
    def start(cls, config: EngineConfig, *, on_loading: OnLoading | None = None) -> Session:
        """Start all replicas and wait until they are ready.

        Args:
            config: with the model's folder, see `locate`.
            on_loading: told (replica, report of a rank) as weights load.

        Raises:
            ValueError: something that the user can mend.
            EngineLostError: a rank or an engine ended while starting.
        """
        resolved = resolve(config)
        check_checkpoint(resolved)
        tokenizer = model_tokenizer(config.model)
        replicas = ReplicaSet.start(resolved, on_loading=on_loading)
        session = cls(replicas, resolved, tokenizer)
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

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a conversation, by the model's chat template.

        Raises:
            ValueError: the model has no template, or it refuses the messages.
        """
        template = self._need_tokenizer().chat_template
        if template is None:
            raise ValueError(
                f"model {self.resolved.config.model.model!r} has no chat template; use generate instead of chat"
            )
        return template.render(messages)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("skip_tokenizer_init=True leaves token ids only; give prompt_token_ids")
        return self.tokenizer

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt that can never run.

        Raises:
            ValueError: it is empty, too long, or holds an id that is no token.
        """
        if not token_ids:
            raise ValueError("prompt has no tokens; give at least one")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens, which leaves no room in max_model_len={self.max_model_len}; "
                f"use at most {self.max_model_len - 1}"
            )
        check_token_ids(token_ids, self.resolved.model.vocab_size)

    def stream(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Iterator[tuple[int, Delta]]:
        """Yield (index of the prompt, what became known of it) until all are finished.

        Leaving the iterator early aborts what still runs.

        Raises:
            ValueError: a prompt that can never run; nothing is submitted then.
            EngineLostError: a rank or an engine ended.
        """
        if self._closed:
            raise ValueError("this LLM is closed; make a new one")
        for prompt in prompts:
            self.check_prompt(prompt)
        if not self._lock.acquire(blocking=False):
            raise ValueError("this LLM is generating already; it serves one call at a time (a server serves many)")
        pending: dict[str, int] = {}
        try:
            yield from self._run(prompts, params, pending)
        finally:
            for request_id in pending:
                self._replicas.abort(request_id)
            self._lock.release()

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], pending: dict[str, int]
    ) -> Iterator[tuple[int, Delta]]:
        waiting = iter(range(len(prompts)))
        most = self.resolved.topology.dp * self.resolved.most_requests  # replicas refuse more than that
        while True:
            for index in itertools.islice(waiting, most - len(pending)):
                request_id = f"local-{next(self._numbers)}"
                pending[request_id] = index
                self._submit(request_id, prompts[index], params[index])
            if not pending:
                return
            for delta in self._replicas.poll(POLL_S):
                if delta.request_id not in pending:
                    continue  # of a call that was left early
                index = pending[delta.request_id]
                if delta.finish_reason is not None:
                    del pending[delta.request_id]
                if delta.finish_reason == "error" and self._replicas.failure is not None:
                    raise EngineLostError(self._replicas.failure.reason)
                yield index, delta

    def _submit(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        try:
            self._replicas.submit(request_id, prompt, params)
        except ReplicaLost as lost:
            raise EngineLostError(str(lost)) from lost

    def close(self) -> None:
        """End all engines and ranks; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._replicas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
