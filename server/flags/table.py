"""The table of command-line flags: names, aliases of other servers, where a value goes, and what the help says.

Not a parser (server/flags/values.py) and not a command (server/cli/main.py). One table serves flags and `--config`.
Units: as the help text of each flag says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...text.parsers import REASONING_FORMATS, TOOL_FORMATS

MODEL, TOPOLOGY, MEMORY, SCHEDULE, SERVER, SAMPLING, GENERAL = (
    "Model", "Topology and device", "Memory", "Scheduling", "HTTP server", "Sampling", "General",
)  # fmt: skip
ENGINE, HTTP, SAMPLE, SHARED, TOOL = "engine", "http", "sample", "shared", "tool"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting.

    Attributes:
        name: long flag without dashes; also the key in a `--config` file.
        group: which object it belongs to: `engine`, `http`, `sample`, `shared` (read by the command line itself), or
            `tool` (of one command alone, server/cli/tools.py).
        kind: `text`, `int`, `ints` (1,2,4), `float`, `bool`, `switch` (a flag without a `--no-` form), `bytes` or
            `list`.
        panel, help: for `--help`.
        field: name of the field it sets; that of the flag with underscores unless given.
        aliases: other spellings, with dashes.
        default: what to print as default.
        hidden: not in `--help`.
        short: a second spelling of one letter, such as `-i`.
    """

    name: str
    group: str
    kind: str
    panel: str
    help: str
    field: str = ""
    aliases: tuple[str, ...] = ()
    default: str = ""
    hidden: bool = False
    short: str = ""

    @property
    def target(self) -> str:
        """Name of the field that the flag sets."""
        return self.field or self.name.replace("-", "_")

    @property
    def help_text(self) -> str:
        """The help with default and aliases."""
        notes = [f"default: {self.default}"] * bool(self.default) + [f"also {', '.join(self.aliases)}"] * bool(
            self.aliases
        )
        return f"{self.help} ({'; '.join(notes)})" if notes else self.help

    @property
    def parameter(self) -> str:
        """Name of the parameter of a command function."""
        return self.name.replace("-", "_")


def _engine(name: str, kind: str, panel: str, help: str, **more: object) -> Flag:
    return Flag(name=name, group=ENGINE, kind=kind, panel=panel, help=help, **more)  # type: ignore[arg-type]


ENGINE_FLAGS = (
    _engine("model", "text", MODEL, "The model, instead of the argument (or in --config).", aliases=("--model-path",)),
    _engine("tokenizer", "text", MODEL, "Folder or hub id of another tokenizer.", aliases=("--tokenizer-path",)),
    _engine("revision", "text", MODEL, "Branch, tag or commit of the model on the hub."),
    _engine("dtype", "text", MODEL, "auto, bfloat16, float16 or float32.", default="auto, the checkpoint's"),
    _engine("quantization", "text", MODEL, "int8 or int4: quantise a bf16, fp16 or fp32 checkpoint while it is loaded.",
            default="none"),
    _engine("load-format", "text", MODEL, "auto, safetensors, or dummy: random weights from config.json alone.",
            default="auto"),
    _engine("max-model-len", "int", MODEL, "Longest prompt and output together, in tokens.",
            aliases=("--context-length", "--max-seq-len"), default="the model's, or what KV holds"),
    _engine("chat-template", "text", MODEL,
            "File, text or name of a Jinja template to use instead of the model's own."),
    _engine("generation-config", "text", MODEL,
            "Where sampling defaults come from: auto, none, or a folder with a generation_config.json.",
            default="auto, the model's"),
    _engine("skip-tokenizer-init", "switch", MODEL, "Token ids in and out, no text."),
    _engine("seed", "int", MODEL, "Of dummy weights and of requests without a seed.", aliases=("--random-seed",),
            default="0"),
    _engine("topology", "text", TOPOLOGY,
            "EPxDPy: y replicas of a group of x ranks; or auto, a .yaml file, or a preset.", default="EP1DP1"),
    _engine("device", "text", TOPOLOGY, "cpu or cuda.", default="cpu"),
    _engine("kernels", "text", TOPOLOGY,
            "What runs layers: auto, kernels of the device, and torch where there are none; or torch alone.",
            default="auto"),
    _engine("batch-invariant", "bool", TOPOLOGY,
            "A row's bits do not depend on how many others are computed with it (GPU; costs speed).",
            default="off"),
    _engine("domains", "text", TOPOLOGY,
            "Domains that this host emulates for --topology auto and for advice: ranks of each, and their link, "
            "e.g. 2+2,rate=100,delay=20 (MB/s, us; CPU).", default="as the topology names them, else one"),
    _engine("threads", "int", TOPOLOGY, "Compute threads a rank (CPU).",
            default="OMP_NUM_THREADS, else cores / ranks"),
    _engine("numa-bind", "bool", TOPOLOGY, "Pin each rank to the cores of one NUMA node (CPU)."),
    _engine("exchange", "text", TOPOLOGY,
            "What joins the ranks of a group: auto, shm, all_to_all, hierarchical, or padded (small decode steps).",
            default="auto"),
    _engine("exchange-payload", "text", TOPOLOGY,
            "How rows travel to experts: auto, as they are, or fp8: half the bytes, rounded.", default="auto"),
    _engine("overlap", "text", TOPOLOGY,
            "What runs while rows travel over links: auto, shared experts, and where a model of the step says that it "
            "pays experts of one half of the rows; on, both in every step; or off.", default="auto"),
    _engine("eplb", "text", TOPOLOGY,
            "How experts are placed: off, evenly; static FILE, by a load of `moewe record`; auto, by what comes.",
            default="off"),
    _engine("ranks", "text", TOPOLOGY, "processes, or threads of one process.", default="processes", hidden=True),
    _engine("gpu-memory-utilization", "float", MEMORY,
            "Share of the device's memory (CPU: the host's) for weights, KV and buffers.",
            aliases=("--mem-fraction-static",), default="0.9"),
    _engine("kv-cache-memory-bytes", "bytes", MEMORY, "KV of a rank, e.g. 512MiB; overrides the share.",
            default="what is left; CPU: up to 1/8 of the host's memory"),
    _engine("kv-cache-dtype", "text", MEMORY,
            "auto, bfloat16, fp8 (e4m3) or int8; the last two keep a scale a token and head.",
            default="auto, what the model runs in"),
    _engine("block-size", "int", MEMORY, "Tokens of a KV block.", aliases=("--page-size",), default="16"),
    _engine("max-num-seqs", "int", SCHEDULE, "Sequences that a rank runs at once.",
            aliases=("--max-running-requests", "--max-batch-size"), default="64"),
    _engine("max-num-batched-tokens", "int", SCHEDULE, "Rows of a step on a rank; longer prompts run in chunks.",
            aliases=("--chunked-prefill-size", "--max-prefill-tokens"), default="512"),
    _engine("max-queued-requests", "int", SCHEDULE, "Waiting requests of a replica; more are refused.", default="4096"),
    _engine("schedule-policy", "text", SCHEDULE, "fcfs, or priority: lower number first.",
            aliases=("--scheduling-policy",), field="policy", default="fcfs"),
    _engine("enforce-eager", "switch", SCHEDULE, "Capture no decode step as a CUDA graph.",
            aliases=("--disable-cuda-graph",)),
    _engine("cuda-graph-sizes", "ints", SCHEDULE,
            "Rows of decode steps to capture, e.g. 1,2,4,8; one number: sizes up to it.",
            aliases=("--cudagraph-capture-sizes", "--cuda-graph-bs"), default="up to --max-num-seqs"),
    _engine("cuda-graph-max-bs", "int", SCHEDULE, "Capture no step of more rows.",
            aliases=("--max-cudagraph-capture-size",), default="--max-num-seqs"),
    _engine("stall-timeout", "float", SCHEDULE, "A rank without progress for this many seconds is stuck.",
            field="stall_timeout_s", default="5"),
)  # fmt: skip


def _http(name: str, kind: str, help: str, **more: object) -> Flag:
    return Flag(name=name, group=HTTP, kind=kind, panel=SERVER, help=help, **more)  # type: ignore[arg-type]


HTTP_FLAGS = (
    _http("host", "text", "Address to bind.", default="127.0.0.1"),
    _http("port", "int", "Port to bind; 0 takes any free one.", default="8000"),
    _http("served-model-name", "list", "Name that requests may ask for; may be repeated.", default="the model"),
    _http("api-key", "list", "Bearer token that requests must carry; may be repeated.", field="api_keys",
          default="$MOEWE_API_KEY, or none"),
    _http("api-key-file", "text", "File of further keys, one a line: unlike a flag no other user can see them."),
    _http("allowed-origins", "list", "Web origin that may call the API from a browser (CORS); repeat, or a JSON list.",
          default="none"),
    _http("allow-credentials", "switch", "Let those origins send cookies and client certificates."),
    _http("allowed-methods", "list", "Methods for those origins.", default="all"),
    _http("allowed-headers", "list", "Request headers for those origins.", default="all"),
    _http("ssl-certfile", "text", "Serve HTTPS with this certificate chain (PEM)."),
    _http("ssl-keyfile", "text", "The certificate's private key (PEM, no password).", default="in --ssl-certfile"),
    _http("ssl-ca-certs", "text", "Ask clients for a certificate that one of these authorities (PEM) signed."),
    _http("limit-concurrency", "int", "Connections that may be open at once; more are refused.", default="16384"),
    _http("disable-access-log", "switch", "No log line for each request.",
          aliases=("--disable-uvicorn-access-log", "--no-access-log")),
    _http("shutdown-timeout", "float", "Seconds that SIGTERM gives running requests.", field="shutdown_timeout_s",
          default="30"),
    _http("max-body-bytes", "bytes", "Larger request bodies are refused.", default="16MiB"),
    _http("max-n", "int", "Choices (n) that one prompt of a request may have.", default="128"),
    _http("log-stats-interval", "float", "Seconds between lines of statistics while busy.",
          field="log_stats_interval_s", default="10"),
    _http("advice-log", "text",
          "File for advice about the layout and what led to it, a JSON object a line; `moewe advise --trace` reads it.",
          default="none"),
    _http("advice-interval", "float", "Seconds of a window, after which the advisor looks at all layouts.",
          field="advice_interval_s", default="30"),
    _http("allow-apply", "switch",
          "Let `moewe apply` change the layout while serving; whoever may send requests may then do that, too."),
    _http("dcgm-url", "text", "A dcgm-exporter, e.g. http://127.0.0.1:9400/metrics: counters of GPUs for /metrics."),
    _http("metrics-compat", "text", "Show figures in /metrics under the names of vllm or sglang, too."),
    _http("price-per-hour", "float",
          "What all of this server costs, in any currency; /metrics then tells the cost of tokens.",
          default="none"),
    _http("tool-call-parser", "text",
          f"How the model writes calls of tools: auto (as its chat template does), none, {', '.join(TOOL_FORMATS)}.",
          aliases=("--tool-parser",), default="auto"),
    _http("reasoning-parser", "text",
          f"How the model marks its reasoning: auto, none, {', '.join(REASONING_FORMATS)}.", default="auto"),
    _http("enable-auto-tool-choice", "switch", "Taken as vLLM has it; tools need no flag here."),
)  # fmt: skip


def _sample(name: str, kind: str, help: str, **more: object) -> Flag:
    return Flag(name=name, group=SAMPLE, kind=kind, panel=SAMPLING, help=help, **more)  # type: ignore[arg-type]


SAMPLING_FLAGS = (
    _sample(
        "max-tokens", "int", "Most tokens to generate.", aliases=("--max-new-tokens",), default="the model's, or 256"
    ),
    _sample("temperature", "float", "0 takes the most likely token.", default="the model's, or 0"),
    _sample(
        "top-p", "float", "Keep the smallest set of tokens that reaches this probability.", default="the model's, or 1"
    ),
    _sample("top-k", "int", "Keep this many most likely tokens; 0 keeps all.", default="the model's, or 0"),
    _sample("min-p", "float", "Keep tokens this likely compared with the likeliest.", default="the model's, or 0"),
    _sample("presence-penalty", "float", "Off the logits of tokens that were written.", default="0"),
    _sample("frequency-penalty", "float", "The same, for each time they were.", default="0"),
    _sample(
        "repetition-penalty", "float", "Divides the logits of tokens in prompt and output.", default="the model's, or 1"
    ),
    _sample("stop", "list", "End at this text; may be repeated."),
    _sample("ignore-eos", "switch", "Go on past the end token."),
)


def _shared(name: str, help: str, **more: object) -> Flag:
    return Flag(name=name, group=SHARED, kind="text", panel=GENERAL, help=help, **more)  # type: ignore[arg-type]


SHARED_FLAGS = (
    _shared(
        "dialect", "How --topology counts DP: moewe, or vllm, sglang, deepseek (DP inside the group).", default="moewe"
    ),
    _shared("config", "YAML file of flags; the command line wins over it."),
    _shared(
        "log-level",
        "debug, info, warning or error; debug shows tracebacks.",
        default="info",
        aliases=("--uvicorn-log-level",),
    ),
    _shared("log-format", "text, or json: one object a line, of all processes.", default="text"),
)

ALIASES = {
    alias: f"--{flag.name}"
    for flag in (*ENGINE_FLAGS, *HTTP_FLAGS, *SAMPLING_FLAGS, *SHARED_FLAGS)
    for alias in flag.aliases
}
_WITH_NUMBERS = tuple(f"--{flag.name}" for flag in ENGINE_FLAGS if flag.kind == "ints")
_BY_FIELD = {flag.target: flag.name for flag in (*ENGINE_FLAGS, *HTTP_FLAGS, *SAMPLING_FLAGS)}


def without_aliases(words: Sequence[str]) -> list[str]:
    """Return a command line with every alias before `--` replaced by the flag that it means; `--eplb static FILE` and
    numbers with blanks between them as one value.

    Example:
        >>> without_aliases(["serve", "m", "--context-length=4096", "--cuda-graph-bs", "1", "2"])
        ['serve', 'm', '--max-model-len=4096', '--cuda-graph-sizes=1,2']
    """
    made: list[str] = []
    for position, word in enumerate(words):
        if word == "--":
            return made + list(words[position:])
        name, equals, value = word.partition("=")
        last = made[-1] if made else ""
        if last == "--eplb=static" and not word.startswith("-"):
            made[-1] += f" {word}"
        elif last in _WITH_NUMBERS and word[:1].isdigit():
            made[-1] += f"={word}"
        elif last.partition("=")[0] in _WITH_NUMBERS and word.isascii() and word.isdigit():
            made[-1] += f",{word}"
        elif made[-1:] == ["--eplb"]:
            made[-1] += f"={word}"
        else:
            made.append(ALIASES.get(name, name) + equals + value)
    return made


def flags_of(*groups: str) -> Iterator[Flag]:
    """Yield the flags of these groups, in the order of the help."""
    for flag in (*ENGINE_FLAGS, *HTTP_FLAGS, *SAMPLING_FLAGS, *SHARED_FLAGS):
        if flag.group in groups:
            yield flag


def with_flag(message: str) -> str:
    """Return a message that begins with `field=` with the flag in place of the field.

    Example:
        >>> with_flag("stall_timeout_s=0.0 is not allowed; use at least 1 second")
        '--stall-timeout=0.0 is not allowed; use at least 1 second'
    """
    field, equals, rest = message.partition("=")
    return f"--{_BY_FIELD[field]}={rest}" if equals and field in _BY_FIELD else message
