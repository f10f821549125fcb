"""Which families run, what shapes each, and what each was checked for: `moewe models` and docs/families.md.

Not the table that models are read by (`families`), which needs torch; tests hold this one against it, and every check
that a row claims against the test that makes it. `python -m moewe.models.checked` writes the page.
No shapes; versions are those of transformers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TRANSFORMERS = "5.24.0"
# Where random checkpoints ran, ranks as threads; the first of CHUNKS (tokens) at all, then one each at the first two.
MOE_TOPOLOGIES = ("EP1DP1", "EP2DP1", "EP4DP1", "EP2DP2")
DENSE_TOPOLOGIES = ("EP1DP1", "EP1DP2")
CHUNKS = (7, 1, 512)
MOE, DENSE = "MoE", "dense"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that families were checked for.

    Attributes:
        what: in a line.
        test: file and function that check it; the fixtures of a family are parameters of it, or named in the file.
    """

    what: str
    test: str


CHECKS: dict[str, Check] = {
    "logits": Check(
        what="fp32 logits within 1e-4 and 16 equal greedy tokens, alone (33 tokens) and in batches of unequal lengths, "
        "at every topology and chunk size below",
        test="tests/e2e/test_families.py::test_one_request_alone_and_a_batch_of_unequal_lengths_equal_transformers",
    ),
    "preemption": Check(
        what="the same when requests lose their KV blocks and begin again",
        test="tests/e2e/test_families_preempted.py::test_preempted_requests_equal_transformers",
    ),
    "processes": Check(
        what="the same greedy tokens from processes, as served: of two ranks where families differ most, else of one",
        test="tests/e2e/test_real_ranks_of_families.py::test_ranks_in_processes_answer_as_the_reference",
    ),
    "bf16": Check(
        what="bf16 as close to fp32 as transformers in bf16 is",
        test="tests/e2e/test_families.py::test_bf16_is_as_close_to_fp32_as_transformers_in_bf16",
    ),
    "layouts": Check(
        what="experts stored one by one and stacked give the same bits",
        test="tests/e2e/test_families.py::test_both_layouts_of_experts_give_the_same_bits",
    ),
    "windows": Check(
        what="windows at their edges, with blocks of 1, 3 and 16 tokens",
        test="tests/e2e/test_windows.py::test_a_window_of_eight_at_its_edges",
    ),
    "runs": Check(
        what="chunked attention at the edges of its chunks, with blocks of 1, 3 and 16 tokens",
        test="tests/e2e/test_windows.py::test_runs_of_sixteen_at_their_edges",
    ),
    "longrope": Check(
        what="long and short rotary frequencies side by side in a batch",
        test="tests/e2e/test_windows.py::test_long_and_short_frequencies_side_by_side",
    ),
    "fp8": Check(
        what="fp8 block-scaled weights, held as they are stored",
        test="tests/e2e/test_quantised_checkpoints.py::test_fp8_blocks_that_do_not_divide_the_weights",
    ),
    "mxfp4": Check(
        what="MXFP4 experts, held as they are stored",
        test="tests/e2e/test_quantised_checkpoints.py::test_mxfp4_experts",
    ),
    "mtp": Check(
        what="layers that predict further tokens are not read, with one line",
        test="tests/e2e/test_family_layouts.py::test_layers_that_predict_further_tokens_are_not_read",
    ),
}
_DENSE_CHECKS = ("logits", "preemption", "processes", "bf16")
_MOE_CHECKS = (*_DENSE_CHECKS, "layouts")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One family.

    Attributes:
        architecture: its class, as config.json lists it.
        models: some that have this model_type; only random checkpoints of their shape were compared.
        fixtures: those random checkpoints (tests/support/fixtures_table.py).
        kind: `MoE` or `dense`.
        has: what shapes it, beside the plain decoder.
        also: further model types that the same entry runs.
        more / less: checks beside those that every family of its kind has, and those of them that say nothing here.
    """

    architecture: str
    models: str
    fixtures: tuple[str, ...]
    kind: str = MOE
    has: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()

    @property
    def checks(self) -> tuple[str, ...]:
        """What it was checked for, as keys of CHECKS."""
        usual = _MOE_CHECKS if self.kind == MOE else _DENSE_CHECKS
        return (*(check for check in usual if check not in self.less), *self.more)

    @property
    def topologies(self) -> tuple[str, ...]:
        """Where it was checked."""
        return MOE_TOPOLOGIES if self.kind == MOE else DENSE_TOPOLOGIES


MLA, GROUPS, SIGMOID, SPARSEMIXER = "latent attention", "expert groups", "sigmoid scores", "sparsemixer"
SELECTION, SHARED, GATED = "selection bias", "shared experts", "gated shared expert"
QK_NORM, WINDOWS, RUNS, SINKS = "QK norm", "windows", "chunked attention", "sinks"
CLAMPED, EXPERT_BIAS, LAYER_NORM, POST_NORM = "clamped SwiGLU", "expert biases", "LayerNorm", "norms after blocks"
SCALED, TEMPERATURE = "multipliers", "query temperature"
_DEEPSEEK = (GROUPS, SIGMOID, SELECTION, SHARED)

CHECKED: dict[str, Checked] = {
    "mixtral": Checked(
        architecture="MixtralForCausalLM", models="Mixtral 8x7B, 8x22B", fixtures=("T-MIX",), has=(WINDOWS,)
    ),
    "qwen2_moe": Checked(
        architecture="Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        fixtures=("T-QW2",),
        has=(GATED, WINDOWS),
    ),
    "qwen3_moe": Checked(
        architecture="Qwen3MoeForCausalLM",
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        fixtures=("T-QW3",),
        has=(QK_NORM, WINDOWS),
    ),
    "olmoe": Checked(architecture="OlmoeForCausalLM", models="OLMoE-1B-7B", fixtures=("T-OLM",), has=(QK_NORM,)),
    "flex_olmo": Checked(
        architecture="FlexOlmoForCausalLM", models="FlexOlmo-7x7B", fixtures=("T-FLX",), has=(QK_NORM, POST_NORM)
    ),
    "deepseek_v2": Checked(
        architecture="DeepseekV2ForCausalLM",
        models="DeepSeek-V2, -V2-Lite, -Coder-V2",
        fixtures=("T-DS2", "T-DS2-groups"),
        has=(MLA, GROUPS, SHARED),
    ),
    "deepseek_v3": Checked(
        architecture="DeepseekV3ForCausalLM",
        models="DeepSeek-V3, -R1; Kimi-K2",
        fixtures=("T-DS3",),
        has=(MLA, *_DEEPSEEK),
        also=("kimi_k2",),
        more=("fp8", "mtp"),
    ),
    "glm4_moe": Checked(
        architecture="Glm4MoeForCausalLM",
        models="GLM-4.5, -4.5-Air, -4.6; the demo",
        fixtures=("T-GLM", "T-GLM-demo"),
        has=(*_DEEPSEEK, QK_NORM),
        more=("mtp",),
    ),
    "glm4_moe_lite": Checked(
        architecture="Glm4MoeLiteForCausalLM", models="GLM-4.7-Flash", fixtures=("T-GLL",), has=(MLA, *_DEEPSEEK)
    ),
    "dots1": Checked(
        architecture="Dots1ForCausalLM",
        models="dots.llm1",
        fixtures=("T-DOT",),
        has=(*_DEEPSEEK, QK_NORM, WINDOWS),
    ),
    "solar_open": Checked(
        architecture="SolarOpenForCausalLM", models="Solar-Open-100B", fixtures=("T-SOL",), has=_DEEPSEEK
    ),
    "gpt_oss": Checked(
        architecture="GptOssForCausalLM",
        models="gpt-oss-20b, -120b",
        fixtures=("T-GOS",),
        has=(WINDOWS, SINKS, CLAMPED, EXPERT_BIAS),
        more=("windows", "mxfp4"),
    ),
    "granitemoe": Checked(
        architecture="GraniteMoeForCausalLM",
        models="Granite-3.0-1B-A400M, -3B-A800M",
        fixtures=("T-GRA",),
        has=(SCALED,),
    ),
    "granitemoeshared": Checked(
        architecture="GraniteMoeSharedForCausalLM",
        models="Granite-MoE with shared experts",
        fixtures=("T-GRS",),
        has=(SHARED, SCALED),
    ),
    "phimoe": Checked(
        architecture="PhimoeForCausalLM",
        models="Phi-3.5-MoE",
        fixtures=("T-PHI",),
        has=(SPARSEMIXER, WINDOWS, LAYER_NORM),
        more=("longrope",),
    ),
    "ernie4_5_moe": Checked(
        architecture="Ernie4_5_MoeForCausalLM",
        models="ERNIE-4.5-21B-A3B, -300B-A47B",
        fixtures=("T-ERN",),
        has=(SELECTION, SHARED),
    ),
    "hunyuan_v1_moe": Checked(
        architecture="HunYuanMoEV1ForCausalLM",
        models="Hunyuan-A13B",
        fixtures=("T-HUN",),
        has=(SHARED, QK_NORM),
    ),
    "minimax_m2": Checked(
        architecture="MiniMaxM2ForCausalLM",
        models="MiniMax-M2",
        fixtures=("T-MM2",),
        has=(SIGMOID, SELECTION, QK_NORM),
        more=("fp8",),
    ),
    "llama4_text": Checked(
        architecture="Llama4ForCausalLM",
        models="Llama-4-Scout, -Maverick (text alone)",
        fixtures=("T-LL4",),
        has=(SIGMOID, SHARED, QK_NORM, RUNS, TEMPERATURE),
        also=("llama4",),
        more=("runs",),
    ),
    "llama": Checked(architecture="LlamaForCausalLM", models="Llama 2 and 3", fixtures=("T-LLA",), kind=DENSE),
    "mistral": Checked(
        architecture="MistralForCausalLM",
        models="Mistral-7B",
        fixtures=("T-MIS",),
        kind=DENSE,
        has=(WINDOWS,),
        more=("windows",),
        less=("preemption",),  # blocks behind its windows come free before anybody has to lose one
    ),
    "qwen2": Checked(
        architecture="Qwen2ForCausalLM", models="Qwen2, Qwen2.5", fixtures=("T-Q2D",), kind=DENSE, has=(WINDOWS,)
    ),
    "qwen3": Checked(
        architecture="Qwen3ForCausalLM", models="Qwen3", fixtures=("T-QWD",), kind=DENSE, has=(QK_NORM, WINDOWS)
    ),
}


def extent() -> str:
    """Return at which topologies and in which chunks, in a sentence."""
    return (
        f"MoE families at {', '.join(MOE_TOPOLOGIES)}; dense families at {', '.join(DENSE_TOPOLOGIES)}; prompts in "
        f"chunks of {CHUNKS[0]} tokens, at the first of these also of {CHUNKS[1]}, at the second of {CHUNKS[2]}."
    )


def as_json() -> dict[str, Any]:
    """Return the whole table as plain data."""
    families = [
        {"model_type": name, **asdict(row), "checks": row.checks, "topologies": row.topologies}
        for name, row in CHECKED.items()
    ]
    for family in families:
        del family["more"], family["less"]
    return {
        "transformers": TRANSFORMERS,
        "chunks": CHUNKS,
        "checks": {name: asdict(check) for name, check in CHECKS.items()},
        "families": families,
    }


def as_markdown() -> str:
    """Return docs/families.md."""
    rows = [
        f"| `{name}`{''.join(f', `{other}`' for other in row.also)} | {row.models} | {', '.join((row.kind, *row.has))} "
        f"| {', '.join(row.checks)} | {', '.join(row.fixtures)} |"
        for name, row in CHECKED.items()
    ]
    checks = [f"| {name} | {check.what} | `{check.test.partition('::')[0]}` |" for name, check in CHECKS.items()]
    return f"""# Families

Written by `make families` from `models/checked.py`; `moewe models` prints the same. Do not edit.

Each family is checked against transformers {TRANSFORMERS} on small random checkpoints that transformers wrote.
The published models of a family have the same fields and tensors; their own weights were not run here, but for
the demo's. A model_type that is not listed is refused by name, and so is a field that asks for something that
the family's entry does not do. [add-a-family.md](add-a-family.md) says how to add one.

| model_type | models | shaped by | checked for | checkpoints |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

| check | what it says | test |
| --- | --- | --- |
{chr(10).join(checks)}

{extent()}
The default test run takes a part of these, `make slow` the rest.
"""


if __name__ == "__main__":
    print(as_markdown(), end="")
