"""What a user can set, as small frozen records owned by the part that they configure.

Not parsing (server/cli/main.py, moewe/llm.py) and not resolving: `runtime.resolve` turns `auto` into numbers in new
objects.
Units: bytes, tokens, seconds.
"""

from __future__ import annotations

import msgspec

LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("int8", "int4")
# Tests set this: they start many ranks, and nobody looks at what these measure of the machine. It then is as little as
# may be.
QUICK_VARIABLE = "MOEWE_QUICK_MEASURE"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint and how to read it.

    Attributes:
        model: folder, hub id or the word `demo`, as the user wrote it.
        path: the folder it resolved to.
        revision: branch, tag or commit on the hub.
        tokenizer: folder or id of another tokenizer; None takes the model's.
        dtype: number format of weights and activations; `auto` takes the checkpoint's.
        quantization: `int8` or `int4`: what matrices become while they are loaded; None leaves them as they are.
        load_format: `auto`, `safetensors`, or `dummy` for random weights from config.json alone.
        skip_tokenizer_init: token ids in, token ids out, no text.
        seed: of dummy weights and of requests without a seed.
        max_model_len: longest prompt + output; None takes the model's, lowered to what the KV pool holds.
        chat_template: a file, Jinja source, or the name of one of the model's templates; None takes the model's own.
        generation_config: where sampling defaults come from: `auto` (the model's generation_config.json), `none`, or a
            folder or file.
    """

    model: str
    path: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    seed: int = 0
    max_model_len: int | None = None
    chat_template: str | None = None
    generation_config: str = "auto"

    def dtype_for(self, checkpoint: str) -> str:
        """Return the number format of weights and activations, where the checkpoint's is `checkpoint`."""
        return checkpoint if self.dtype == "auto" else self.dtype


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks are laid out and what they run on.

    Attributes:
        topology: canonical long form, e.g. `EP2DP1[adp=2,atp=1,red=0]`, or `auto`.
        ranks: `processes`, or `threads` of one process (tests).
        device: `cpu` or `cuda`.
        domains: of a host that emulates several, ranks of each and their link, e.g. `2+2,rate=100,delay=20`; None: as
            the topology says, else one. They bound what `auto` and the advisor choose from.
        threads: compute threads a rank; None takes what OMP_NUM_THREADS names, else divides the cores of the host
            among its ranks.
        numa_bind: pin each rank to the cores of one NUMA node.
        kernels: what runs layers: `auto`, kernels of the device; `torch`; or `triton`, which a CPU can only interpret.
        batch_invariant: on a GPU, a row's bits do not depend on how many others are computed with it.
        exchange: what joins the ranks of a group: `auto`, or one of `topologies.exchange_choice.EXCHANGES`.
        exchange_payload: how rows travel to experts: `auto` as they are, `fp8` in e4m3 with a scale for 128 columns.
        overlap: what runs while rows travel over links: `auto`, or one of `topologies.overlap_choice.OVERLAPS`.
        eplb: what places experts: `off`, `static FILE` by the load in a file, or `auto` by the load that comes.
        eplb_load: that load, [MoE layers, experts] i64; resolving reads it, nobody sets it.
        eplb_slots: the expert of each slot, [MoE layers, slots] i32, where the file says which experts fire together
            and ranks are in several domains; as `eplb_load`.
    """

    topology: str = "EP1DP1"
    ranks: str = "processes"
    device: str = "cpu"
    domains: str | None = None
    threads: int | None = None
    numa_bind: bool = False
    kernels: str = "auto"
    batch_invariant: bool = False
    exchange: str = "auto"
    exchange_payload: str = "auto"
    overlap: str = "auto"
    eplb: str = "off"
    eplb_load: bytes = b""
    eplb_slots: bytes = b""


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much KV a rank holds.

    Attributes:
        block_size: tokens a block.
        kv_cache_memory_bytes: KV bytes a rank; None derives it from `gpu_memory_utilization`.
        gpu_memory_utilization: share of the device's memory for weights and KV (on CPU: of the host's, over its ranks).
        num_blocks: exact number of blocks a rank, for tests; None derives it.
        kv_cache_dtype: number format of KV: `auto` (the model's own), `bfloat16`, `fp8` (e4m3) or `int8`; the last two
            with a scale a token and KV head.
    """

    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"


class ScheduleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and of the queue, per rank where not said otherwise.

    Attributes:
        max_num_seqs: sequences that run at once on a rank.
        max_num_batched_tokens: rows of a step on a rank; longer prompts run in chunks.
        max_queued_requests: waiting requests of a replica; more are refused.
        policy: `fcfs`, or `priority` (lower number first, then arrival).
        stall_timeout_s: a rank whose counters stand still for this long in a step is stuck.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 4096
    policy: str = "fcfs"
    stall_timeout_s: float = 5.0


class GraphOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which decode steps a GPU replays as CUDA graphs; a CPU knows none.

    Attributes:
        enforce_eager: none; resolving sets it, too, where none can be captured.
        cuda_graph_sizes: rows of a step to capture; one number: sizes up to it; empty leaves the choice open.
        cuda_graph_max_bs: no graph has more rows; None: up to `max_num_seqs`.
        graph_rows, graph_bytes: rows of all graphs, and what these will take of a rank, as estimated; resolving fills
            them in, nobody sets them.
    """

    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] = ()
    cuda_graph_max_bs: int | None = None
    graph_rows: tuple[int, ...] = ()
    graph_bytes: int = 0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a replica is started with."""

    model: ModelOptions
    parallel: ParallelOptions = ParallelOptions()
    cache: CacheOptions = CacheOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    graphs: GraphOptions = GraphOptions()
