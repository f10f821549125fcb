"""What the server knows while it runs: its model, its limits, its phase and its replicas.

Not the life of the process (server/http/serve.py) and not routes (server/http/app.py). One a server; the event loop
owns it.
Units: tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ..runtime.config import EngineConfig
from ..runtime.generation_defaults import GenerationDefaults
from ..runtime.messages import Ready, Stats
from ..runtime.metrics.export import Metrics
from ..runtime.trace_session import TraceSession
from ..text import ChatTemplate, Tokenizer
from ..text.grammar_check import GrammarCheck
from ..text.parsers import OutputFormat, output_format
from ..topologies.advisor.records import Advice
from .errors import ApiError, unavailable
from .grammar_queue import GrammarQueue
from .hub import Hub
from .options import ServerOptions

if TYPE_CHECKING:
    from ..models.config import ModelConfig
    from ..runtime.resolve import Resolved


class Phase(Enum):
    """Where the server is in its life; it only moves down this list."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class LayoutChanges(Protocol):
    """What routes need of server/http/layout_change.py."""

    @property
    def is_running(self) -> bool:
        """True while a change is under way."""
        ...

    def view(self) -> dict[str, Any] | None:
        """Return the latest change as JSON; None before the first."""
        ...

    async def begin(self, asked: str | None) -> object:
        """Begin to change to the layout `asked` for, by default to the advised one."""
        ...


@dataclass
class ServerState:
    """Everything that routes read.

    Attributes:
        tokenizer: None with `skip_tokenizer_init`.
        template: the chat template in use, or None.
        defaults: sampling where a request leaves it open.
        hub: live requests.
        started: Unix seconds, the `created` of /v1/models.
        ready: what each replica said when it was ready.
        stats: of each replica, as of the last `refresh`.
        latest_stats: asks the replicas.
        begin_trace: starts a step trace of so many steps; None before there are replicas.
        trace: the step trace that is being recorded.
        layout_changer: changes the layout; None before there are replicas.
        advice: the latest about the layout; None before the first window has ended.
        problem: why the server failed.
        grammar_check: tries grammars before an engine sees them.
    """

    config: EngineConfig
    options: ServerOptions
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: GenerationDefaults
    metrics: Metrics
    hub: Hub
    started: int
    phase: Phase = Phase.LOADING
    ready: list[Ready] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    latest_stats: Callable[[], list[Stats]] = list
    begin_trace: Callable[[int], TraceSession] | None = None
    trace: TraceSession | None = None
    advice: Advice | None = None
    layout_changer: LayoutChanges | None = None
    problem: str = ""
    grammar_check: GrammarCheck = field(default_factory=GrammarCheck)

    @cached_property
    def grammar_queue(self) -> GrammarQueue:
        """When `grammar_check` tries which grammar."""
        return GrammarQueue(self.grammar_check)

    @cached_property
    def output_format(self) -> OutputFormat:
        """How the model writes reasoning and calls: as told, else as its chat template does."""
        options = self.options
        source = None if self.template is None else self.template.source
        return output_format(options.tool_call_parser, options.reasoning_parser, source)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The special tokens of the tokenizer, as text."""
        tokens = self.tokenizer
        return frozenset() if tokens is None else frozenset(tokens.token_text(i) for i in tokens.special_ids)

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which requests may ask for the model; the first is reported."""
        return self.options.served_model_name or (self.config.model.model,)

    @property
    def max_model_len(self) -> int:
        """Longest sequence that every replica takes, prompt and output."""
        return min(self.model_config.max_position_embeddings, *(ready.max_model_len for ready in self.ready))

    def begin(self, ready: Sequence[Ready]) -> None:
        """Take requests from now on: `ready` is what each replica said."""
        self.ready = list(ready)
        for replica, one in enumerate(self.ready):
            self.metrics.set_ready(replica, one)
        self.refresh()
        self.enter(Phase.READY)

    def move_to(self, resolved: Resolved, ready: Sequence[Ready]) -> None:
        """Show another layout from now on, of which `ready` is what each replica said."""
        self.config, self.ready, self.stats = resolved.config, list(ready), []
        self.hub.most_live = resolved.topology.dp * resolved.most_requests
        self.metrics.move_to(resolved.topology.long())
        for replica, one in enumerate(self.ready):
            self.metrics.set_ready(replica, one)
        self.refresh()

    def refresh(self) -> None:
        """Take the latest statistics of the replicas over into `stats` and metrics."""
        for replica, stats in enumerate(latest := self.latest_stats()):
            if replica >= len(self.stats) or self.stats[replica] is not stats:
                self.metrics.observe_stats(replica, stats)
        self.stats = latest

    def enter(self, phase: Phase) -> None:
        """Move on to `phase`; never back."""
        order = list(Phase)
        if order.index(phase) > order.index(self.phase):
            self.phase = phase
            self.metrics.ready = phase is Phase.READY

    def require_ready(self) -> None:
        """Raise ApiError unless requests are taken."""
        if self.phase is Phase.LOADING:
            raise unavailable("the model is still loading; try again when /ready answers 200", "loading")
        if self.phase is Phase.DRAINING:
            raise unavailable("the server is shutting down; send the request elsewhere", "shutting_down")
        if self.phase is Phase.FAILED:
            raise unavailable(f"the engine is lost: {self.problem}", "engine_lost")

    def require_model(self, name: str | None) -> None:
        """Raise ApiError unless `name` is one of ours."""
        if name not in self.names:
            served = ", ".join(repr(known) for known in self.names)
            asked = "no model was named" if name is None else f"model {name[:200]!r} does not exist"
            raise ApiError(404, f"{asked}; this server has {served}", param="model", code="model_not_found")
