"""`LLM`: generation from Python, for the same hands as other servers' offline classes.

Not a server, and not asynchronous: a call returns when its prompts are finished. torch is imported when one is made.
Units: token ids; log-probabilities are natural.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .runtime.messages import Delta, LogprobEntry
from .runtime.options import layout_config
from .runtime.params import SamplingParams

if TYPE_CHECKING:
    from .runtime.config import EngineConfig

# A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]
_FORMS = "give text, token ids, {'prompt_token_ids': ids}, or a list of these"


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One candidate at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(kw_only=True)
class CompletionOutput:
    """What was generated for a prompt.

    Attributes:
        index: number of the output among the prompt's `n`.
        text: empty without a tokenizer.
        token_ids: an end token included.
        logprobs: per token, token id -> Logprob, the chosen token always in it; None when not asked.
        finish_reason: `stop`, `length`, `abort` or `error`.
        stop_reason: the stop string or stop token that ended it; None for anything else.
        error: what went wrong when it is `error`.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the chosen tokens; None when not asked."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))

    def add(self, delta: Delta) -> None:
        """Append what became known."""
        self.token_ids += delta.token_ids
        self.text += delta.text
        if self.logprobs is not None:
            self.logprobs += [_as_dict(entries) for entries in delta.logprobs]
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.error = delta.error


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        request_id: number of the prompt in the call, as text.
        prompt: None when token ids were given.
        prompt_token_ids: what the model saw.
        outputs: as many as `n`.
        prompt_logprobs: per token of the prompt, token id -> Logprob, the prompt's own token always in it, and None for
            the first token; None as a whole when not asked.
        finished: false only while streaming.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True

    def add(self, choice: int, delta: Delta) -> None:
        """Append what became known of output number `choice`."""
        self.outputs[choice].add(delta)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += [_as_dict(entries) if entries else None for entries in delta.prompt_logprobs]
        self.finished = all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A model on a topology, ready to generate.

    Args:
        model: folder, hub id, or the word `demo`.
        topology: `EPxDPy`, a .yaml file or a preset; how other systems count DP: `dialect=`.
        options: any field of `EngineConfig`'s parts, e.g. dtype, device, max_model_len, tokenizer, skip_tokenizer_init,
            seed, load_format, ranks, kv_cache_memory_bytes, max_num_seqs, chat_template (a file, Jinja source, or the
            name of one of the model's), generation_config (`none` drops the model's sampling defaults).

    Raises:
        ValueError: one line that names the option, its value and the fix.

    Example:
        with LLM("demo", topology="EP2DP1") as llm:
            llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str, *, topology: str = "EP1DP1", dialect: str | None = None, **options: Any) -> None:
        from .runtime.session import Session, locate

        config = layout_config({"model": model, "topology": topology, **options}, dialect=dialect)
        self._session = Session.start(locate(config))

    @property
    def config(self) -> EngineConfig:
        """What is running, without `auto`."""
        return self._session.resolved.config

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._session.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a call without sampling_params uses: the defaults of the model's generation_config.json."""
        return self._session.defaults.params({})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for every prompt; all run at once, as far as the engine's limits allow.

        Args:
            prompts: a text, token ids, `{"prompt_token_ids": ids}`, or a list of these.
            sampling_params: one for all or one a prompt; None takes `get_default_sampling_params()`.
            progress: draw a bar on stderr.

        Returns:
            One result a prompt, in order, each with as many outputs as its `n`.

        Raises:
            ValueError, TypeError: something that cannot run as asked; nothing was submitted.
            RuntimeError: the engine was lost, the LLM is closed, or another call is running: an LLM serves one call at
                a time, from whichever thread (a server serves many).
        """
        made = [self._request(number, prompt) for number, prompt in enumerate(_as_list(prompts))]
        return self._finish(made, self._params(made, sampling_params), progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next turn of a conversation, or of each of several; arguments as for `generate`.

        Args:
            chat_template_kwargs: further variables of the template, plain JSON.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        kwargs = chat_template_kwargs or {}
        made = [self._chat_request(number, conversation, kwargs) for number, conversation in enumerate(several)]
        return self._finish(made, self._params(made, sampling_params), progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text for one prompt as it is generated; leaving early aborts it.

        Raises:
            ValueError: something that cannot run as asked, or n above 1: texts of several outputs would mix.
        """
        made = self._request(0, prompt)
        params = self._params([made], sampling_params)
        if params[0].n != 1:
            raise ValueError(f"n={params[0].n} is not allowed in stream; use 1, or generate")
        for _, delta in self._session.stream([made.prompt_token_ids], params):
            if delta.finish_reason == "error":
                raise RuntimeError(delta.error or "the request failed")
            if delta.text:
                yield delta.text

    def close(self) -> None:
        """End all processes of this model; safe to call twice."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, number: int, prompt: Prompt) -> RequestOutput:
        text, ids = _split_prompt(prompt)
        if text is not None:
            ids = self._session.encode(text)
        assert ids is not None
        return _unanswered(number, text, ids)

    def _params(
        self, made: Sequence[RequestOutput], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            return [self._session.params(request.prompt_token_ids, {}) for request in made]
        return _params_for(len(made), params)

    def _chat_request(self, number: int, messages: Any, kwargs: Mapping[str, Any]) -> RequestOutput:
        text = self._session.render(messages, kwargs)
        return _unanswered(number, text, self._session.encode(text, add_special_tokens=False))

    def _finish(self, made: list[RequestOutput], params: list[SamplingParams], progress: bool) -> list[RequestOutput]:
        places: list[tuple[RequestOutput, int]] = []
        for request, own in zip(made, params, strict=True):
            wants = own.logprobs is not None
            request.outputs = [CompletionOutput(index=i, logprobs=[] if wants else None) for i in range(own.n)]
            request.prompt_logprobs = None if own.prompt_logprobs is None else []
            places += [(request, choice) for choice in range(own.n)]
        tick, done = _progress_bar(len(made)) if progress else ((lambda: None), (lambda: None))
        try:
            for index, delta in self._session.stream([request.prompt_token_ids for request in made], params):
                request, choice = places[index]
                request.add(choice, delta)
                if request.finished:
                    tick()
        finally:
            done()
        return made


def _unanswered(number: int, text: str | None, token_ids: list[int]) -> RequestOutput:
    """Return what becomes the result of prompt `number`; its outputs are made when their number is known."""
    return RequestOutput(request_id=str(number), prompt=text, prompt_token_ids=token_ids, outputs=[], finished=False)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r} is no prompt; {_FORMS}")
    items = list(prompts)
    if items and all(type(item) is int for item in items):
        return [items]  # one prompt as token ids
    return items


def _split_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return (text, None) or (None, token ids)."""
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt"}:
            prompt = prompt["prompt"]
        elif set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        else:
            raise ValueError(f"prompt has the keys {sorted(map(str, prompt))}; use either prompt or prompt_token_ids")
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Iterable):
        raise TypeError(f"prompt={prompt!r} is no prompt; {_FORMS}")
    ids = list(prompt)
    wrong = next((item for item in ids if type(item) is not int), None)
    if wrong is not None:
        raise ValueError(f"prompt_token_ids has {wrong!r}; token ids are whole numbers")
    return None, ids  # type: ignore[return-value]


def _params_for(number: int, params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * number
    if isinstance(params, Mapping):
        raise TypeError(f"sampling_params={params!r} is a mapping; give SamplingParams(...) with these as keywords")
    if not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
        raise TypeError(f"sampling_params={params!r} is not allowed; give one SamplingParams, or a list of them")
    if len(params) != number:
        raise ValueError(f"sampling_params has {len(params)} entries for {number} prompts; give one, or one a prompt")
    return list(params)


def _as_dict(entries: Sequence[LogprobEntry]) -> dict[int, Logprob]:
    return {
        entry.token_id: Logprob(logprob=entry.logprob, rank=entry.rank, decoded_token=entry.decoded_token)
        for entry in entries
    }


def _progress_bar(total: int) -> tuple[Callable[[], None], Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(file=sys.stderr))
    task = bar.add_task("prompts", total=total)
    bar.start()
    return (lambda: bar.advance(task)), bar.stop
