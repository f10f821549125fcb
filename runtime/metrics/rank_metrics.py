"""The part of the table of metrics that is about replicas and their ranks.

Not the values (runtime/metrics/ranks.py) and not the part about requests (request_metrics.py). A rank has at most 64
series, whatever the numbers of layers and experts; what is much the same on all ranks stands under the replica.
`phase` is the kind of a step over all ranks of its group, so a rank without rows counts the step too. Units stand in
the entries.
"""

from __future__ import annotations

from .metric import Metric

_RANK = ("replica", "rank")
_PHASE = ("replica", "rank", "phase")

RANK_METRICS = (
    Metric(
        "moewe_requests_running", "gauge", ("replica",), "requests",
        "Requests that hold a slot and KV blocks.",
        "At `--max-num-seqs` for each rank, seats bind: raise it while `moewe_kv_usage_ratio` is low.",
    ),
    Metric(
        "moewe_requests_waiting", "gauge", ("replica",), "requests",
        "Requests in the queue.",
        "As the queue time.",
    ),
    Metric(
        "moewe_rank_requests_running", "gauge", _RANK, "requests",
        "Running requests of the rank, or of its attention replica.",
        "One rank far above others: prompts that share a prefix go to one rank; else none.",
    ),
    Metric(
        "moewe_preemptions_total", "counter", ("replica",), "preemptions",
        "Requests put back for lack of blocks.",
        "KV is short: lower `--max-num-seqs`, keep KV in fp8, or give it more memory; each preemption computes a "
        "prompt again.",
    ),
    Metric(
        "moewe_kv_blocks_used", "gauge", _RANK, "blocks",
        "KV blocks that running requests hold.",
        "See the ratio.",
    ),
    Metric(
        "moewe_kv_blocks", "gauge", _RANK, "blocks",
        "KV blocks there are.",
        "Nothing: more is better.",
    ),
    Metric(
        "moewe_kv_usage_ratio", "gauge", _RANK, "ratio",
        "Used over existing KV blocks.",
        "Near 1 with requests waiting, KV binds: `--kv-cache-dtype fp8`, more memory, more ranks.",
    ),
    Metric(
        "moewe_kv_bytes", "gauge", ("replica", "format"), "bytes",
        "The pools of KV blocks of all ranks by number format, with their scales.",
        "A part of the memory of ranks; `--kv-cache-dtype` and `--gpu-memory-utilization` change it.",
    ),
    Metric(
        "moewe_steps_total", "counter", _PHASE, "steps",
        "Steps by the kind of step.",
        "Many `mixed` steps: prompts and decodes disturb each other.",
    ),
    Metric(
        "moewe_step_tokens", "histogram", ("replica",), "tokens",
        "Per step with any rows: rows on all ranks of the replica, of prompts and of decodes.",
        "Steps of many rows take longer and read weights less often for each token; `--max-num-seqs` bounds decodes, "
        "`--max-num-batched-tokens` prompts.",
    ),
    Metric(
        "moewe_batch_tokens_total", "counter", _PHASE, "tokens",
        "Rows of such steps that were the rank's own; over `moewe_steps_total` it is the mean batch.",
        "A larger mean batch reads weights less often for each token, and takes longer a step.",
    ),
    Metric(
        "moewe_busy_seconds_total", "counter", _PHASE, "seconds",
        "Time from first to last operation of steps, waiting for other ranks within them included.",
        "Near the wall time the rank is never without work: see `moewe_bound`.",
    ),
    Metric(
        "moewe_host_seconds_total", "counter", _RANK, "seconds",
        "Of the busy time, the host's part: plan, inputs, sampling and results, before layers begin and after logits"
        " are there.",
        "Steps are short beside what Python does around them: larger batches, fewer log-probabilities and penalties,"
        " a core of its own for each rank.",
    ),
    Metric(
        "moewe_starved_seconds_total", "counter", _RANK, "seconds",
        "Time between steps in which the rank had sequences to run and waited for a plan.",
        "The engine does not keep up: give it a core, fewer ranks a replica, fewer requests with grammars or stop "
        "strings.",
    ),
    Metric(
        "moewe_wall_seconds_total", "counter", ("replica",), "seconds",
        "Time since the replica was ready: of it, each rank was busy, starved, or had nothing to do.",
        "Nothing: it is the clock.",
    ),
    Metric(
        "moewe_memory_bytes_total", "counter", (*_PHASE, "component"), "bytes",
        "Bytes touched: expert slots really hit, other weights, KV read and written, activations (the residual "
        "stream).",
        "`routed` leads in decode: larger batches share experts. `kv` leads: long contexts, keep KV in fp8. "
        "`attention`: divide heads (`atp=`), lower formats. `dense`, `shared`: lower formats, larger batches, which "
        "read them once.",
    ),
    Metric(
        "moewe_measured_memory_bytes_total", "counter", _RANK, "bytes",
        "All traffic of the GPU's memory as its own counter saw it: NVML GPM (Hopper and newer, with nvidia-ml-py), "
        "else the exporter of `--dcgm-url`; nothing where there is none.",
        "See the error ratio.",
    ),
    Metric(
        "moewe_model_error_ratio", "gauge", _RANK, "ratio",
        "Counted bytes of weights and KV over measured ones, less 1, in the last one to two minutes; of GPUs with a "
        "counter.",
        "Far below 0, the hardware moves what is not counted: activations, copies of formats without a kernel, other "
        "programs. Above 0, weights come from its cache.",
    ),
    Metric(
        "moewe_gpu_energy_joules_total", "counter", _RANK, "joules",
        "What the rank's GPU has used since the rank was ready: NVML (Volta and newer, with nvidia-ml-py), else the "
        "exporter of `--dcgm-url`; nothing where there is none. Its rate is watts.",
        "Divide by tokens: larger batches and lower formats need fewer joules for each. At the board's limit clocks "
        "fall.",
    ),
    Metric(
        "moewe_matrix_operations_total", "counter", (*_RANK, "component"), "operations",
        "Operations of matrix products over rows really run, a multiplication and an addition are two: projections "
        "of `attention`, its scores and sums `kv`, experts, and `dense` (dense FFN, router, head).",
        "`kv` leads: long contexts. `dense` leads in decode: the head, over a large vocabulary.",
    ),
    Metric(
        "moewe_memory_bandwidth_ceiling_bytes_per_second", "gauge", ("replica",), "bytes/second",
        "Reading speed of a rank: what all ranks of the replica reached together at start, over their number.",
        "Nothing. Lower than the machine's others: memory channels, NUMA, a neighbour that reads too.",
    ),
    Metric(
        "moewe_matrix_rate_ceiling_operations_per_second", "gauge", ("replica", "format"), "operations/second",
        "The same of matrix products, by number `format`; a multiplication and an addition are two. In cache with "
        "native kernels, with the library of a GPU; nothing elsewhere.",
        "Nothing. Lower than the machine's others: clocks, instructions that are missing (`moewe doctor`).",
    ),
    Metric(
        "moewe_memory_saturation_ratio", "gauge", _PHASE, "ratio",
        "S-MBU: bytes of weights and KV over busy time x ceiling, in the last one to two minutes; 0 when no such "
        "step ran.",
        "Above 0.7 memory is used well, and only fewer bytes help: lower formats, larger batches, more ranks. Low "
        "with the verdict `memory` elsewhere: see `moewe_bound`.",
    ),
    Metric(
        "moewe_compute_saturation_ratio", "gauge", _PHASE, "ratio",
        "S-MFU: operations over busy time x matrix rate, in the last one to two minutes; the rate is of int8 where "
        "most weights are int8 or int4, else of bf16. 0 when no such step ran or no rate is known.",
        "Above 0.5 in `prefill` arithmetic binds, and only more cores or ranks help; in `decode` it is low by "
        "nature.",
    ),
    Metric(
        "moewe_arithmetic_intensity_operations_per_byte", "gauge", ("replica", "phase"), "operations/byte",
        "Operations for each byte of weights and KV, over all ranks, in the last one to two minutes.",
        "Above the ridge point arithmetic binds, below it memory: larger batches raise it.",
    ),
    Metric(
        "moewe_ridge_point_operations_per_byte", "gauge", ("replica",), "operations/byte",
        "Matrix rate over memory bandwidth, as measured at start: where both ceilings meet.",
        "Nothing: a property of the machine.",
    ),
    Metric(
        "moewe_bound", "gauge", (*_RANK, "by"), "1",
        "1 for what binds the rank, in the last one to two minutes: `memory`, `compute`, `link`, `host`, "
        "`imbalance`, `queue` or `idle`; the others have no sample. Nothing where a ceiling is not known.",
        "See the share of that name.",
    ),
    Metric(
        "moewe_bound_share_ratio", "gauge", ("replica", "by"), "ratio",
        "Shares that led to the verdict, means over ranks: of wall time, and they sum to 1, but `queue`, which is of"
        " the requests' time.",
        "`memory`: fewer bytes (formats, batch, ranks). `compute`: more cores or ranks, shorter prompts. `link`: "
        "fewer or nearer ranks, `--exchange-payload fp8`. `host`: larger batches, more cores. `imbalance`: `--eplb`,"
        " `red=`. `queue`: more seats, KV or replicas. `idle`: fewer replicas.",
    ),
    Metric(
        "moewe_cache_resident", "gauge", ("replica",), "1",
        "1 when the weights of all ranks of the replica together fit the host's last-level caches, or the ceiling was"
        " measured over less than twice those: the saturation ratio then says nothing about memory.",
        "At 1, ignore `moewe_memory_saturation_ratio`: this model is too small for it, or too little memory was free "
        "at start (`moewe doctor`).",
    ),
    Metric(
        "moewe_rank_memory_bytes", "gauge", (*_RANK, "part"), "bytes",
        "What the rank holds by `part`: `weights`; of its pool of KV what has tokens in it (`kv_used`), what requests "
        "were granted beyond that (`kv_reserved`) and what nobody has (`kv_free`); rows on their way between ranks "
        "(`exchange`); decode steps captured as CUDA graphs (`graphs`); and whatever else of its process, or of its "
        "GPU, is in memory (`other`; pages of the pool that were never written take none).",
        "`weights`: lower formats (`--quantization`), more ranks in a group. `kv_used` with `kv_free` near 0: "
        "`--kv-cache-dtype fp8`, fewer seats. `kv_reserved`: many short requests, each with a block that is not full. "
        "`exchange`: a smaller `--max-num-batched-tokens`. `graphs`: `--cuda-graph-max-bs`. `other`: a one-rank "
        "replica has its engine in it; beyond some GB, other programs on the GPU, or a leak.",
    ),
    Metric(
        "moewe_weight_kind_bytes", "gauge", ("replica", "kind", "format"), "bytes",
        "Weights of all ranks by `kind` (attention, routed, shared, dense, embedding, head) and number `format`, "
        "scales included.",
        "Shows what a lower format or a wider group would save.",
    ),
    Metric(
        "moewe_exchange_bytes_total", "counter", (*_RANK, "scope"), "bytes",
        "Rows and answers that the rank sent by `scope`: `rank` (to itself), inside its `domain`, `between` domains.",
        "`between` is dear: domains that hold what fires together, `--exchange hierarchical`, `--exchange-payload "
        "fp8`.",
    ),
    Metric(
        "moewe_exchange_seconds_total", "counter", (*_RANK, "scope"), "seconds",
        "Time in collectives by the farthest scope they reach, waiting included; `rank`: work beside them. CPU only.",
        "Alike on all ranks it is the link, see the bytes; high on all but one, that one is slow: see "
        "`moewe_expert_imbalance_ratio`.",
    ),
    Metric(
        "moewe_expert_slots", "gauge", _RANK, "slots",
        "Expert slots of a MoE layer that the rank holds, redundant ones included; 0 in a model without experts.",
        "One more than on other ranks: experts do not divide evenly, its memory is what binds. `red=` fills up the "
        "others.",
    ),
    Metric(
        "moewe_expert_tokens_total", "counter", _RANK, "tokens",
        "Rows that routed experts of the rank computed.",
        "One rank far above others: place experts by load (`--eplb`).",
    ),
    Metric(
        "moewe_expert_imbalance_ratio", "gauge", ("replica", "scope"), "ratio",
        "Busiest over mean `rank` or expert `slot`, averaged over MoE layers, in the last one to two minutes.",
        "By `rank` above 1.3: place experts by load (`--eplb`), or add redundant slots (`red=`). By `slot` alone it "
        "does no harm.",
    ),
    Metric(
        "moewe_unowned_expert_ids_total", "counter", _RANK, "ids",
        "Routed ids that no slot holds: always 0, or a bug.",
        "Report it.",
    ),
)  # fmt: skip
