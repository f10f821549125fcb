"""The commands around a server, `bench` and `run-batch`: their flags and what they run.

Not the tools (server/bench/, server/commands/run_batch.py), which are imported when one runs, and not the parser
(server/cli/main.py). Units: as the help text of each flag says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..flags.table import ENGINE, HTTP_FLAGS, SHARED, TOOL, Flag, flags_of
from .plan_flags import PLAN_FLAGS

SERVER, DATA, LOAD, REQUESTS, OUTPUT = "Server to measure", "Data set", "Load", "Requests", "Output"
RECORD, QUALITY = "Routing", "Quality"


def _flag(name: str, kind: str, panel: str, help: str, **more: Any) -> Flag:
    return Flag(name=name, group=TOOL, kind=kind, panel=panel, help=help, **more)


_TARGET = (
    _flag("base-url", "text", SERVER, "Where it is, with or without /v1.", default="http://127.0.0.1:8000"),
    _flag("model", "text", SERVER, "Name that requests ask for.", default="the first of /v1/models"),
    _flag("endpoint", "text", SERVER, "completions, chat, or a path such as /v1/completions.", default="completions"),
    _flag("api-key", "text", SERVER, "Bearer token, shown nowhere.", default="$MOEWE_API_KEY or $OPENAI_API_KEY"),
    _flag("header", "list", SERVER, "NAME=VALUE, sent with every request; may be repeated."),
)
_DATA = (
    _flag("dataset-name", "text", DATA, "random, sharegpt or trace.", default="random"),
    _flag("dataset-path", "text", DATA, "sharegpt: JSON of conversations; trace: JSON lines with timestamp (ms), "
          "input_length, output_length, and perhaps hash_ids."),
    _flag("num-prompts", "int", DATA, "Requests to send.", default="1000; a trace: all of it"),
)  # fmt: skip
_SPREAD = (
    _flag("random-range-ratio", "float", DATA, "random: lengths lie within this share of the mean on either side.",
          default="0"),
    _flag("random-prefix-len", "int", DATA, "random: tokens that all prompts begin with, beside their own.",
          default="0"),
)  # fmt: skip
_OTHER_DATA = (
    _flag("sharegpt-output-len", "int", DATA, "sharegpt: tokens to generate.", default="those of the answer"),
    _flag("trace-speed", "float", DATA, "trace: 2 replays in half the time.", default="1"),
    _flag("trace-block-size", "int", DATA, "trace: tokens that one of hash_ids stands for.", default="512"),
)
_UNTIMED_DATA = tuple(flag for flag in _OTHER_DATA if flag.name != "trace-speed")
_FORM = (
    _flag("prompt-form", "text", DATA, "ids (completions only) or text.", default="ids; chat: text"),
    _flag("tokenizer", "text", DATA, "Folder or hub id; makes texts of exact length and counts those of sharegpt.",
          default="none, lengths of texts are estimates"),
    _flag("vocab-size", "int", DATA, "Token ids of prompts lie from 100 to below this.",
          default="the tokenizer's, or 1000"),
)  # fmt: skip
_LOAD = (
    _flag("request-rate", "float", LOAD, "Requests/s on average, Poisson; inf sends all at once.", default="inf"),
    _flag("burstiness", "float", LOAD, "Below 1 burstier than Poisson, above 1 steadier.", default="1"),
    _flag("max-concurrency", "int", LOAD, "Requests that run at once.", default="no limit"),
    _flag("num-warmups", "int", LOAD, "Requests before the measured ones; if one fails, the run ends.", default="1"),
    _flag("timeout", "float", LOAD, "Seconds after which a request counts as failed.", default="none"),
    _flag("seed", "int", LOAD, "Of prompts, lengths and arrivals.", default="0"),
)
_REQUESTS = (
    _flag("temperature", "float", REQUESTS, "0 takes the most likely token.", default="the server's"),
    _flag("ignore-eos", "switch", REQUESTS, "Go on past the end token (vLLM, SGLang, moewe): comparable lengths."),
    _flag("extra-body", "text", REQUESTS, "JSON object of further fields of every request."),
    _flag("goodput", "list", REQUESTS, "Targets such as ttft:200 tpot:50 e2el:5000, in ms; counts requests/s that "
          "meet all."),
)  # fmt: skip
_OUTPUT = (
    _flag("output-json", "text", OUTPUT, "File for settings and figures."),
    _flag("plot", "text", OUTPUT, "Picture of the latencies, .png, .svg or .pdf; needs the optional extra `bench`."),
)
_LATENCY = (
    _flag("input-len", "int", LOAD, "Tokens of each prompt.", field="random_input_len", default="32"),
    _flag("output-len", "int", LOAD, "Tokens to generate.", field="random_output_len", default="128"),
    _flag("batch-size", "int", LOAD, "Prompts at once.", default="8"),
    _flag("num-iters", "int", LOAD, "Batches to measure.", default="10"),
    _flag("num-iters-warmup", "int", LOAD, "Batches before them.", default="2"),
    _flag("temperature", "float", REQUESTS, "0 takes the most likely token.", default="0"),
)
_THROUGHPUT_LENGTHS = (
    _flag("input-len", "int", DATA, "random: tokens of a prompt.", field="random_input_len", default="1024"),
    _flag("output-len", "int", DATA, "random: tokens to generate.", field="random_output_len", default="128"),
)
_RANDOM_LENGTHS = (
    _flag("random-input-len", "int", DATA, "random: tokens of a prompt.", default="1024"),
    _flag("random-output-len", "int", DATA, "random: tokens to generate.", default="128"),
)
_RECORD = (
    _flag("prompts", "text", RECORD, "Text file, a prompt a line."),
    _flag("max-tokens", "int", RECORD, "Tokens to generate for each prompt.", default="64"),
    _flag("temperature", "float", RECORD, "0 takes the most likely token.", default="0"),
    _flag("trace", "text", RECORD, "File (.npz) for the trace: every choice, for `moewe replay`."),
    _flag("load", "text", RECORD, "File (JSON) for the load of each expert, for `--eplb static FILE`."),
    _flag("most-tokens", "int", RECORD, "Tokens to keep of prompts, and of answers.", default="100000"),
)
_REPLAY = (
    _flag("trace", "text", RECORD, "What `moewe record --trace` wrote."),
    _flag("topology", "text", RECORD, "EPxDPy, with [red=..,domains=..] as a server takes it.", default="EP8DP1"),
    _flag("row-bytes", "int", RECORD, "Bytes of a token on its way to an expert.", default="14336"),
    _flag("load", "text", RECORD, "File (JSON) for the load of each expert, for `--eplb static FILE`."),
)
_BATCH = (
    _flag("input-file", "text", "Batch", "JSON lines with custom_id, method, url and body.", short="-i"),
    _flag("output-file", "text", "Batch", "JSON lines with custom_id, response and error; written anew.", short="-o"),
)
_EVAL = (
    _flag("text", "text", QUALITY, "Text file (UTF-8) to read; best one that the model has not seen."),
    _flag("context", "int", QUALITY, "Tokens of the pieces that the text is read in.", default="1024"),
    _flag("most-tokens", "int", QUALITY, "Tokens of the text to read.", default="100000"),
    _flag("against", "list", QUALITY, "FLAG=VALUE of a second run to compare with, such as quantization=int8 or "
          "topology=EP2DP1; may be repeated."),
    _flag("needle", "list", QUALITY, "Tokens of a prompt in which a number is hidden and asked for; may be repeated."),
    _flag("needle-trials", "int", QUALITY, "Questions for each length and depth.", default="4"),
    _flag("output-json", "text", OUTPUT, "File for settings and figures."),
)  # fmt: skip
_TOP = (
    _flag("url", "list", SERVER, "A server, with or without http:// and /v1; may be repeated, as may a word without "
          "--url.", default="http://127.0.0.1:8000"),
    *(flag for flag in _TARGET if flag.name in ("api-key", "header")),
    _flag("interval", "float", OUTPUT, "Seconds between two readings.", default="2"),
    _flag("once", "switch", OUTPUT, "Print the figures of one interval and leave; exit code 1 if a server has none."),
    _flag("json", "switch", OUTPUT, "With --once: JSON for scripts."),
)  # fmt: skip
_TRACE = (
    _flag("url", "list", SERVER, "The server, with or without http:// and /v1; the word alone does too.",
          default="http://127.0.0.1:8000"),
    *(flag for flag in _TARGET if flag.name in ("api-key", "header")),
    _flag("steps", "int", LOAD, "Steps that each replica records, 1 to 1000.", default="200"),
    _flag("idle-timeout", "float", LOAD, "Seconds without a step after which it ends with what it has.", default="10"),
    _flag("output", "text", OUTPUT, "File for the trace.", default="moewe-trace.json"),
)  # fmt: skip
_ADVISE = (
    _flag("url", "list", SERVER, "The server, with or without http:// and /v1; the word alone does too.",
          default="http://127.0.0.1:8000"),
    *(flag for flag in _TARGET if flag.name in ("api-key", "header")),
    _flag("trace", "text", DATA, "Replay a log that --advice-log wrote, instead of asking a server; exit code 1 if it "
          "holds other advice."),
    _flag("json", "switch", OUTPUT, "JSON with every figure, instead of text; of a replay an object a window."),
)  # fmt: skip
_APPLY = (
    *(flag for flag in _ADVISE if flag.name in ("url", "api-key", "header")),
    _flag("topology", "text", LOAD, "EPxDPy to change to.", default="what the advisor advises"),
)
_SERVED_NAME = tuple(flag for flag in HTTP_FLAGS if flag.name == "served-model-name")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A command.

    Attributes:
        name: the last word of it.
        help: for `--help`.
        flags: all that it takes.
        run: takes `Settings` and returns the exit code.
        takes_model: MODEL is an argument.
        model_help: what is said of it; "" says the usual.
        parent: the word before `name`, if any.
        words: the flag (a list) that further words on the command line belong to.
        words_alone: such words need no flag before them.
    """

    name: str
    help: str
    flags: tuple[Flag, ...]
    run: Callable[[Any], int]
    takes_model: bool = True
    model_help: str = ""
    parent: str = ""
    words: str = ""
    words_alone: bool = False


def _bench_serve(settings: Any) -> int:
    from ..bench.online import bench_serve

    return bench_serve(settings.tool)


def _bench_latency(settings: Any) -> int:
    from ..bench.offline import bench_latency

    return bench_latency(settings)


def _bench_throughput(settings: Any) -> int:
    from ..bench.offline import bench_throughput

    return bench_throughput(settings)


def _record(settings: Any) -> int:
    from ..commands.record import record

    return record(settings)


def _replay(settings: Any) -> int:
    from ..commands.record import replay_file

    return replay_file(settings.tool)


def _eval(settings: Any) -> int:
    from ..eval.command import evaluate

    return evaluate(settings)


def _top(settings: Any) -> int:
    from ..top.command import top

    return top(settings.tool)


def _trace(settings: Any) -> int:
    from ..trace.command import trace

    return trace(settings.tool)


def _advise(settings: Any) -> int:
    from ..advise.command import advise

    return advise(settings.tool)


def _apply(settings: Any) -> int:
    from ..advise.apply import apply

    return apply(settings.tool)


def _plan(settings: Any) -> int:
    from ..plan.command import plan

    return plan(settings)


def _run_batch(settings: Any) -> int:
    from ..commands.run_batch import run_batch

    return run_batch(settings)


_GENERAL = tuple(flag for flag in flags_of(SHARED) if flag.name != "dialect")
BENCH_HELP = "Measure: a running server, or a model without one."
TOOLS = (
    Tool(
        name="serve",
        parent="bench",
        help="Put load on a running OpenAI-compatible server and measure latencies and rates. Ctrl-C stops at once and "
        "shows what was measured. Needs the optional extra `bench` of moewe.",
        flags=(*_TARGET, *_DATA, *_RANDOM_LENGTHS, *_SPREAD, *_OTHER_DATA, *_FORM, *_LOAD, *_REQUESTS, *_OUTPUT,
               *_GENERAL),
        run=_bench_serve,
        takes_model=False,
        words="goodput",
    ),
    Tool(
        name="latency",
        parent="bench",
        help="Load MODEL here and time a batch of equal prompts, several times.",
        flags=(*_LATENCY, *_OUTPUT, *flags_of(ENGINE, SHARED)),
        run=_bench_latency,
    ),
    Tool(
        name="throughput",
        parent="bench",
        help="Load MODEL here, run many prompts at once and count tokens/s.",
        flags=(*_DATA, *_THROUGHPUT_LENGTHS, *_SPREAD, *_UNTIMED_DATA, _LATENCY[-1], *_OUTPUT,
               *flags_of(ENGINE, SHARED)),
        run=_bench_throughput,
    ),
    Tool(
        name="run-batch",
        help="Answer a file of requests in OpenAI's batch format: moewe run-batch -i IN -o OUT MODEL.",
        flags=(*_BATCH, *_SERVED_NAME, *flags_of(ENGINE, SHARED)),
        run=_run_batch,
    ),
    Tool(
        name="record",
        help="Answer prompts on one rank and keep which experts their tokens chose; say what placements make of it.",
        flags=(*_RECORD, *flags_of(ENGINE, SHARED)),
        run=_record,
    ),
    Tool(
        name="replay",
        help="Say what placements make of a recorded trace: how even ranks are, and what crosses domains.",
        flags=(*_REPLAY, *_GENERAL),
        run=_replay,
        takes_model=False,
    ),
    Tool(
        name="eval",
        help="Read a text and say what answers are worth: perplexity, agreement with another format or topology, "
        "numbers found in long prompts.",
        flags=(*_EVAL, *flags_of(ENGINE, SHARED)),
        run=_eval,
    ),
    Tool(
        name="top",
        help="Show what servers do: saturation of memory by rank and component, rates, latencies, KV, queues. "
        "moewe top [URL ...]; Ctrl-C leaves.",
        flags=(*_TOP, *_GENERAL),
        run=_top,
        takes_model=False,
        words="url",
        words_alone=True,
    ),
    Tool(
        name="trace",
        help="Record where the time of a server's next steps goes, by rank and part: a file for Perfetto or Chrome, "
        "and a table of shares. moewe trace URL; Ctrl-C stops.",
        flags=(*_TRACE, *_GENERAL),
        run=_trace,
        takes_model=False,
        words="url",
        words_alone=True,
    ),
    Tool(
        name="advise",
        help="Say which layout suits the load of a server, what each other one is expected to bring and cost, and why; "
        "or replay a log of such advice. moewe advise URL; moewe advise --trace FILE.",
        flags=(*_ADVISE, *_GENERAL),
        run=_advise,
        takes_model=False,
        words="url",
        words_alone=True,
    ),
    Tool(
        name="apply",
        help="Change the layout of a running server, some replicas at a time while others serve: moewe apply URL. The "
        "server must allow it (--allow-apply).",
        flags=(*_APPLY, *_GENERAL),
        run=_apply,
        takes_model=False,
        words="url",
        words_alone=True,
    ),
    Tool(
        name="plan",
        help="Say what a layout of MODEL takes on a machine, without weights: bytes of a rank line by line, the time "
        "of a step part by part, latencies, rates, cost, and the same layout in the flags of other servers.",
        flags=(*PLAN_FLAGS, *flags_of(SHARED)),
        run=_plan,
        model_help="Folder with a config.json, the name of a published model such as deepseek-v3, or the word demo.",
    ),
)  # fmt: skip


def join_words(given: dict[str, Any], tool: Tool) -> dict[str, Any]:
    """Return what stands on the command line, with words that stand alone put to the flag that they belong to.

    Raises:
        ValueError: there are such words without that flag, where it has to stand before them.
    """
    words = given.pop("words_argument", None) or []
    if words and not (tool.words_alone or given.get(tool.words)):
        raise ValueError(f"{words[0]!r} is more than this command takes; settings are flags, see --help")
    return {**given, tool.words: [*(given.get(tool.words) or []), *words]} if words else given
