"""Published deployments, and what the planner says of them.

Rates are of one GPU. Where a source names no batch, the one that KV holds is taken, at most 1,024; where it names no
length of answers, contexts are those of prompts. `overlap` where the source runs two micro-batches. Sources by row:
1, 2: deepseek-ai open-infra-index (day 6) and profile-data; 3, 4, 5, 7, 10: LMSYS blogs of 2025-05-05, 06-16, 09-25,
07-20 and September (Ant Group); 8, 9: vLLM blog, 2025-12; 11, 11b: InferenceX, 2026-05-22; 14: TensorRT-LLM blog.
Units: tokens/s of one GPU, tokens, sequences of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moewe.models.architecture import architecture
from moewe.models.published import published_config
from moewe.topologies import parse_topology
from moewe.topologies.planner.architecture import Architecture
from moewe.topologies.planner.hardware import load_hardware
from moewe.topologies.planner.pools import plan_pool
from moewe.topologies.planner.serving import Pool, Workload, decode_step, prefill_service, serve
from moewe.topologies.planner.step_time import Setting

DECODE, PREFILL, BOTH = "output / GPUs that decode", "input / GPUs for prompts", "input and output / all GPUs"
OUTPUT = "output / all GPUs"
MOST_SEQUENCES = 1024
# An accepted length of 2.37 with three drafts (LMSYS, 2026-02-19, DeepSeek-R1): 1 + a + a**2 + a**3.
ACCEPTANCE = 0.655


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One published rate.

    Attributes:
        row: of the list of deployments; figures with `main` decide whether a row is within 25 %, by their mean.
        what: in words.
        published: rate, as `unit` counts it.
        hardware, topology, model, weights, kv: as `moewe plan` takes them.
        isl, osl: tokens.
        batch: sequences of a rank; None takes what KV holds.
        concurrency, prompts: of BOTH: requests, and the topology of the pool for prompts.
        chunk: rows of prompts in a step.
    """

    row: str
    what: str
    published: float
    hardware: str
    topology: str
    unit: str = DECODE
    main: bool = True
    model: str = "deepseek-v3"
    weights: str = "fp8"
    kv: str = "auto"
    isl: int
    osl: int = 0
    batch: float | None = None
    concurrency: int = 0
    prompts: str = ""
    chunk: int = 16384
    hit: float = 0.0
    overlap: bool = False
    drafts: int = 0
    acceptance: float = ACCEPTANCE

    @property
    def batch_from(self) -> str:
        """Where the batch is from."""
        if self.unit in (PREFILL, BOTH):
            return "load"
        return "KV" if self.batch is None else "source"


def _serve11(row: str, hardware: str, conc: int, p: str, d: str, rate: float, drafts: int) -> Deployment:
    return Deployment(
        row=row, what=f"{hardware} NVFP4 MTP {conc} requests, {d}", published=rate, hardware=hardware, topology=d,
        prompts=p, unit=BOTH, weights="nvfp4", kv="fp8", isl=1024, osl=1024, concurrency=conc, chunk=8192,
        drafts=drafts,
    )  # fmt: skip


DEPLOYMENTS = (
    Deployment(row="1", what="H800 EP144 decode", published=1850, hardware="h800", topology="EP144DP1[red=32]",
               isl=4989, batch=88, overlap=True),
    Deployment(row="1", what="H800 EP32 prompts, hits counted", published=9212, hardware="h800", main=False,
               topology="EP32DP1[red=32]", unit=PREFILL, isl=4989, hit=0.563, overlap=True),
    Deployment(row="2", what="H800 EP128 decode, balanced", published=2325, hardware="h800", topology="EP128DP1",
               isl=4096, batch=128, overlap=True),
    Deployment(row="2", what="H800 EP32 prompts, balanced", published=7839, hardware="h800", topology="EP32DP1",
               main=False, unit=PREFILL, isl=4096, overlap=True),
    Deployment(row="3a", what="H100 EP32 prompts of 4K", published=6288, hardware="h100", topology="EP32DP1[red=32]",
               unit=PREFILL, isl=4096, overlap=True),
    Deployment(row="3a", what="H100 EP32 prompts of 1K", published=7209, hardware="h100", topology="EP32DP1[red=32]",
               unit=PREFILL, main=False, isl=1024, overlap=True),
    Deployment(row="3b", what="H100 EP72 decode", published=2785, hardware="h100", topology="EP72DP1[red=32]",
               isl=2048, batch=256, overlap=True),
    Deployment(row="4", what="GB200 EP48 decode", published=7583, hardware="gb200-nvl72", topology="EP48DP1[red=32]",
               isl=2048),
    Deployment(row="5a", what="GB200 EP48 decode NVFP4", published=13386, hardware="gb200-nvl72",
               topology="EP48DP1[red=32]", weights="nvfp4", kv="fp8", isl=2048, batch=1408),
    Deployment(row="5a", what="GB200 EP2 prompts NVFP4", published=26156, hardware="gb200-nvl72", topology="EP2DP1",
               weights="nvfp4", kv="fp8", unit=PREFILL, main=False, isl=2048),
    Deployment(row="5b", what="GB200 EP48 decode FP8", published=9087, hardware="gb200-nvl72",
               topology="EP48DP1[red=32]", isl=2048),
    Deployment(row="5b", what="GB200 EP4 prompts FP8", published=18471, hardware="gb200-nvl72", topology="EP4DP1",
               unit=PREFILL, main=False, isl=2048),
    Deployment(row="7", what="H200 EP96 decode Kimi-K2", published=3000, hardware="h200", model="kimi-k2",
               topology="EP96DP1[red=96]", isl=2000, osl=100, batch=480, overlap=True),
    Deployment(row="7", what="H200 EP32 prompts Kimi-K2", published=7000, hardware="h200", model="kimi-k2",
               topology="EP32DP1", unit=PREFILL, main=False, isl=2000, overlap=True),
    Deployment(row="8", what="H200 EP32 decode, vLLM", published=2200, hardware="h200", topology="EP32DP1[red=32]",
               isl=2048, osl=2048, overlap=True),
    Deployment(row="9", what="GB200 EP8 decode NVFP4, vLLM", published=10100, hardware="gb200-nvl72",
               topology="EP8DP1", weights="nvfp4", kv="fp8", isl=2048, osl=2048),
    Deployment(row="9", what="GB200 EP2 prompts NVFP4, vLLM", published=26200, hardware="gb200-nvl72",
               topology="EP2DP1", weights="nvfp4", kv="fp8", unit=PREFILL, main=False, isl=2048),
    Deployment(row="10", what="H20 EP16 decode, MTP 1", published=712, hardware="h20", topology="EP16DP1", kv="fp8",
               isl=4096, osl=1536, drafts=1, acceptance=0.85),
    Deployment(row="10", what="H20 TP8 prompts", published=2062, hardware="h20", topology="EP8DP1[atp=8]",
               unit=PREFILL, main=False, isl=4096),
    _serve11("11", "gb200-nvl72", 180, "EP4DP1", "EP32DP1", 1149, 3),
    _serve11("11", "gb200-nvl72", 2253, "EP4DP3", "EP32DP1", 7698, 3),
    _serve11("11", "gb200-nvl72", 4301, "EP4DP2", "EP16DP1", 12660, 3),
    _serve11("11", "gb200-nvl72", 16130, "EP4DP3", "EP4DP5", 14659, 1),
    _serve11("11b", "b200", 1214, "EP4DP1", "EP8DP2", 7111, 3),
    _serve11("11b", "b200", 4968, "EP4DP3", "EP8DP4", 9660, 3),
    _serve11("11b", "b200", 10860, "EP4DP3", "EP4DP5", 12515, 1),
    Deployment(row="14", what="B200 EP8, one pool, NVFP4", published=4600, hardware="b200", topology="EP8DP1",
               weights="nvfp4", kv="fp8", unit=OUTPUT, isl=1024, osl=2048, chunk=2048),
)  # fmt: skip


@cache
def _model(name: str, weights: str, kv: str) -> Architecture:
    return architecture(published_config(name), name=name, weights=weights, kv=kv)


def _setting(deployment: Deployment, topology: str) -> Setting:
    return Setting(
        model=_model(deployment.model, deployment.weights, deployment.kv),
        topology=parse_topology(topology),
        hardware=load_hardware(deployment.hardware),
        overlap=deployment.overlap,
    )


def predicted(deployment: Deployment) -> float:
    """Return the rate that the planner gives, as the deployment's unit counts it."""
    setting = _setting(deployment, deployment.topology)
    load = Workload(
        isl=deployment.isl,
        osl=max(1, deployment.osl),
        concurrency=deployment.concurrency or 1,
        hit=deployment.hit,
        drafts=deployment.drafts,
        acceptance=deployment.acceptance,
    )
    if deployment.unit == PREFILL:
        pool = Pool(setting=setting, chunk=deployment.chunk, most_sequences=1)
        return prefill_service(pool, load)[1] * deployment.isl / setting.topology.num_ranks
    if deployment.unit == BOTH:
        decode = Pool(setting=setting, chunk=1, most_sequences=MOST_SEQUENCES)
        prompts = Pool(setting=_setting(deployment, deployment.prompts), chunk=deployment.chunk, most_sequences=1)
        served = serve(decode, load, prompts)
        return served.total_rate / served.num_gpus
    batch = deployment.batch if deployment.batch is not None else _held(setting, load)
    if deployment.unit == OUTPUT:
        pool = Pool(setting=setting, chunk=deployment.chunk, most_sequences=int(batch))
        full = Workload(isl=load.isl, osl=load.osl, concurrency=int(batch) * pool.servers)
        served = serve(pool, full)
        return served.output_rate / served.num_gpus
    return batch * load.tokens_a_step / decode_step(setting, load, batch).seconds


def _held(setting: Setting, load: Workload) -> int:
    """Return the sequences that KV of a rank holds, at most MOST_SEQUENCES."""
    many = Workload(isl=load.isl, osl=load.osl, concurrency=MOST_SEQUENCES * setting.topology.num_ranks)
    return min(MOST_SEQUENCES, plan_pool(setting, many, chunk=1).pool.most_sequences)
