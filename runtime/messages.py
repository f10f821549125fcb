"""Every message between server, engines and workers, as tagged msgspec structs.

Not a transport (runtime/processes/channel.py). Never pickle: what cannot be said with these structs is not said.
Units: token ids are i32 bytes (`plan.pack`); times are seconds of the sender's monotonic clock unless named `_unix`.
"""

from __future__ import annotations

import msgspec

from ..topologies.exchange_cost import MeasuredLinks
from ..topologies.link_probes import LinkProbe, RankFound
from .params import SamplingParams
from .plan import RankPlan, RankResult, StepHeader
from .rank_stats import BalanceStats, Gpu, RankStats


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag is the class name."""


# --- client (server process or LLM) -> engine ------------------------------------------------------------------------
class Submit(Message, frozen=True, kw_only=True):
    """A validated request. `request_id` is unique among the client's live requests; lower `priority` runs first."""

    request_id: str
    prompt_token_ids: bytes
    params: SamplingParams
    priority: int = 0


class Abort(Message, frozen=True, kw_only=True):
    """Forget these requests and free what they hold; unknown ids are ignored."""

    request_ids: tuple[str, ...]


class Shutdown(Message, frozen=True, kw_only=True):
    """Stop. With `drain`, running and queued requests are finished first."""

    drain: bool = False


class StartTrace(Message, frozen=True, kw_only=True):
    """Record where `num_steps` steps spend time, and answer with `Traced`; `most_marks` in all end it early."""

    trace_id: int
    num_steps: int
    most_marks: int


class StopTrace(Message, frozen=True, kw_only=True):
    """End the trace now and answer with what there is; an id that is not recorded is ignored."""

    trace_id: int


# --- engine -> client -------------------------------------------------------------------------------------------------
class LogprobEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int
    decoded_token: str | None


# Why a request was not run: it never can be, too many wait, the engine does not keep up, it is about to end, or its
# grammar is none. The last: why one ended on the way, namely where its grammar lets nothing follow.
INVALID_REQUEST, QUEUE_FULL, ENGINE_BUSY, SHUTTING_DOWN, INVALID_GRAMMAR, GRAMMAR_STUCK = ERROR_CODES = (
    "invalid_request", "queue_full", "engine_busy", "shutting_down", "invalid_grammar", "grammar_stuck",
)  # fmt: skip


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What became known of one request since its last delta. (`gc=False`: thousands a second, and none in a cycle.)

    Attributes:
        request_id: whose.
        token_ids: new tokens, in order (an end token is included here but not in `text`).
        text: new text, complete characters only; text that may begin a stop string is held back.
        logprobs: per new token, candidates with the chosen token first; empty when not asked.
        finish_reason: None while running; `stop`, `length`, `abort` or `error`.
        error: what went wrong when `finish_reason` is `error`.
        error_code: the same for programs: one of ERROR_CODES, or None when the engine itself failed.
        first_scheduled: monotonic seconds at which the request first ran; 0 before.
        num_preemptions: how often it was preempted so far.
        prompt_logprobs: for the next tokens of the prompt, in order, candidates with the prompt's own token first;
            empty for the very first token, of which nothing can be said. All of them come before any new token.
        stop_reason: the stop string or stop token that ended it; None for anything else.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[tuple[LogprobEntry, ...], ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    first_scheduled: float = 0.0
    num_preemptions: int = 0
    error_code: str | None = None
    prompt_logprobs: tuple[tuple[LogprobEntry, ...], ...] = ()
    stop_reason: int | str | None = None


def refusal(request_id: str, error: str, code: str) -> Delta:
    """Return the one delta of a request that is not run; `code` is one of ERROR_CODES."""
    return Delta(request_id=request_id, finish_reason="error", error=error, error_code=code)


class Outputs(Message, frozen=True, kw_only=True):
    """Deltas of one step, at most one a request."""

    deltas: tuple[Delta, ...]


class Loading(Message, frozen=True, kw_only=True):
    """Progress of loading on one rank, in bytes."""

    rank: int
    done_bytes: int
    total_bytes: int


class Capturing(Message, frozen=True, kw_only=True):
    """Progress of capturing CUDA graphs on one rank, in shapes."""

    rank: int
    done: int
    total: int


class Ready(Message, frozen=True, kw_only=True):
    """Loaded and warm. `capacity` is exact: blocks a rank, tokens a block.

    Attributes:
        num_blocks: usable KV blocks of each rank in a cache group that keeps whole sequences (others: `kv_layout`).
        block_size: tokens a block.
        max_model_len: longest sequence accepted, prompt and output.
        max_num_seqs: sequences a rank runs at once.
        memory_bandwidth: measured read ceiling of each rank while all of them read, bytes/s.
        matrix_rates: per rank, operations/s of products in cache by number format, while all of them multiply.
        weight_bytes: per rank, bytes of weights held.
        weight_bytes_read: per rank, bytes read from disk.
        expert_slots: per rank, expert slots of a MoE layer that it holds; they stay as many when experts move.
        weight_kinds: per rank, bytes held by `kind/format` (models.weights.bytes_by_kind).
        kv_bytes: per rank, bytes of the KV pool by number format, scales included.
        isa: instructions of native kernels, "" without them.
        gpus: per rank, which one it runs on; empty on CPUs.
        pids: worker processes (the engine's own pid for ranks that are threads).
        links: what exchanges really take; None where no rows travel.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory_bandwidth: tuple[float, ...]
    weight_bytes: tuple[int, ...]
    weight_bytes_read: tuple[int, ...]
    pids: tuple[int, ...]
    expert_slots: tuple[int, ...] = ()
    weight_kinds: tuple[dict[str, int], ...] = ()
    kv_bytes: tuple[dict[str, int], ...] = ()
    matrix_rates: tuple[dict[str, float], ...] = ()
    links: MeasuredLinks | None = None
    isa: str = ""
    gpus: tuple[Gpu, ...] = ()


class Stats(Message, frozen=True, kw_only=True):
    """State of one engine; sent at most twice a second while busy, once when it falls idle, and each second.

    `num_prompt_tokens` counts chunks as they start, those that a preemption makes run again included.
    `step_tokens` counts steps by their rows on all ranks, in the buckets of `metrics.histogram.TOKEN_BOUNDS`, and
    `num_step_tokens` those rows. `balance` is None where experts do not move.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    ranks: tuple[RankStats, ...] = ()
    num_prompt_tokens: int = 0
    running_per_rank: tuple[int, ...] = ()
    balance: BalanceStats | None = None
    step_tokens: tuple[int, ...] = ()
    num_step_tokens: int = 0


class TraceProgress(Message, frozen=True, kw_only=True):
    """So many steps are recorded."""

    trace_id: int
    num_steps: int


class TracedStep(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One recorded step; `rows` and `marks` (`telemetry.StepMarks.packed`) have an entry a rank."""

    step: int
    phase: str
    rows: tuple[int, ...]
    marks: tuple[bytes, ...]


class Traced(Message, frozen=True, kw_only=True):
    """A trace.

    Attributes:
        steps: in order.
        engine: i64 [n, 4] flattened: part (index into `step_recorder.ENGINE_PARTS`), step, begin and end in
            nanoseconds of CLOCK_MONOTONIC.
        is_full: it ended early, as it had `most_marks`.
    """

    trace_id: int
    steps: tuple[TracedStep, ...]
    engine: bytes
    is_full: bool = False


class Failed(Message, frozen=True, kw_only=True):
    """The engine is lost; it has ended its workers and exits. `rank` is -1 when no single rank is to blame."""

    reason: str
    rank: int = -1
    user_error: bool = False


class Stopped(Message, frozen=True, kw_only=True):
    """The engine has ended its workers after `Shutdown` and exits."""


# --- engine -> worker -------------------------------------------------------------------------------------------------
class AllocateKV(Message, frozen=True, kw_only=True):
    """Hold what `kv_layout` makes of `num_blocks` from now on (after `Loaded`; the engine takes the least of them).

    A rank also compiles what its steps need, without any other rank.
    """

    num_blocks: int


class WarmUp(Message, frozen=True, kw_only=True):
    """Run steps with all other ranks, and capture them (after `Compiled` of all, so that none waits for a compiler)."""


class BeginServing(Message, frozen=True, kw_only=True):
    """All ranks are warm (after `KVAllocated` of all): from now on a collective may take `timeout_s`, no longer."""

    timeout_s: float


class ProbeLinks(Message, frozen=True, kw_only=True):
    """Do what `probe` says, together with all other ranks (after `BeginServing`)."""

    probe: LinkProbe


class RunStep(Message, frozen=True, kw_only=True):
    """Run one step: the common header and this rank's delta."""

    header: StepHeader
    plan: RankPlan


class PrepareMoves(Message, frozen=True, kw_only=True):
    """Hold the weights of other experts aside, to be put into slots when a step names `placement`; answer when done.

    Attributes:
        placement: number of the placement that they are for.
        moves: i32 [n, 3] flattened rows (MoE layer, slot of this rank, expert).
        layers: MoE layers that change anywhere in the group.
        tables: i32 [layers, experts] flattened, the slot of the group that this rank uses for each expert then.
    """

    placement: int
    moves: bytes
    layers: tuple[int, ...]
    tables: bytes


class DropMoves(Message, frozen=True, kw_only=True):
    """Forget what was prepared for `placement`: some rank could not."""

    placement: int


class StopWorker(Message, frozen=True, kw_only=True):
    """Leave the loop and exit."""


# --- worker -> engine -------------------------------------------------------------------------------------------------
class Loaded(Message, frozen=True, kw_only=True):
    """Weights are in place on `rank`, so many of each kind and format; it could hold `num_blocks` KV blocks.

    `expert_slots` are those of a MoE layer; `kernels` says what runs in kernels of a GPU, and what does not.
    """

    rank: int
    num_blocks: int
    weight_bytes: int
    weight_bytes_read: int
    pid: int
    kernels: tuple[str, ...] = ()
    expert_slots: int = 0
    weight_kinds: dict[str, int] = {}


class Compiled(Message, frozen=True, kw_only=True):
    """KV of `rank` is there, and kernels that its steps need are compiled; it waits for the others."""

    rank: int


class KVAllocated(Message, frozen=True, kw_only=True):
    """The rank is warm: its steps have run, and those that can be are captured.

    Attributes:
        memory_bandwidth: how fast this rank reads memory while all others do too, bytes/s.
        cache_resident: that was measured in a cache, and says nothing about memory.
        matrix_rates: operations/s of its products in cache by number format, while all multiply; empty: not known.
        kv_bytes: of the pool by number format, scales included.
        isa: instructions of its native kernels, "" without them.
        gpu: which one it runs on; None on a CPU.
    """

    rank: int
    memory_bandwidth: float
    cache_resident: bool = False
    kv_bytes: dict[str, int] = {}
    matrix_rates: dict[str, float] = {}
    isa: str = ""
    gpu: Gpu | None = None


class LinksProbed(Message, frozen=True, kw_only=True):
    """What a rank found when it was told to probe."""

    rank: int
    found: RankFound


class StepDone(Message, frozen=True, kw_only=True):
    """The outcome of one step on one rank."""

    rank: int
    result: RankResult


class RankCounted(Message, frozen=True, kw_only=True):
    """Counters of an idle rank that had not gone out with a result (`RankResult.counters`)."""

    rank: int
    counters: bytes


class MovesPrepared(Message, frozen=True, kw_only=True):
    """A rank has prepared a placement in so many seconds, beside its steps; or could not, then `error` says why."""

    rank: int
    placement: int
    error: str = ""
    seconds: float = 0.0


class WorkerFailed(Message, frozen=True, kw_only=True):
    """An exception ended the worker. `user_error` marks a mistake that the user can mend (bad checkpoint)."""

    rank: int
    reason: str
    user_error: bool = False


ToEngine = Submit | Abort | Shutdown | StartTrace | StopTrace
FromEngine = Outputs | Loading | Capturing | Ready | Stats | TraceProgress | Traced | Failed | Stopped
ToWorker = AllocateKV | WarmUp | BeginServing | ProbeLinks | RunStep | PrepareMoves | DropMoves | StopWorker
FromWorker = (
    Loaded
    | Compiled
    | KVAllocated
    | LinksProbed
    | StepDone
    | RankCounted
    | MovesPrepared
    | WorkerFailed
    | Loading
    | Capturing
)
