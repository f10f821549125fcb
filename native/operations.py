"""The operations of a model that have a native kernel: a name for people, and the C function that does the work.

Not the functions (csrc/) and not who calls them. Where the library lacks a function torch does that operation, and
all of them in float32 and float16, for the kernels take bf16 activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from .library import Outcome


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        name: what people call it.
        function: the C function.
        matrix: it multiplies matrices, with tile instructions where there are any.
    """

    name: str
    function: str
    matrix: bool = False

    def path(self, outcome: Outcome) -> str:
        """Return who does it here: "native amx", "native avx512", "native avx2" or "torch"."""
        if outcome.library is None or not hasattr(outcome.library, self.function):
            return "torch"
        return f"native {'avx512' if outcome.isa == 'amx' and not self.matrix else outcome.isa}"


OPERATIONS = (
    Operation("whole layers", "moewe_layers", matrix=True),
    Operation("attention half of a layer", "moewe_attention_half", matrix=True),
    Operation("linear", "moewe_linear", matrix=True),
    Operation("embedding rows", "moewe_gather_rows"),
    Operation("normalisation and residual", "moewe_norm"),
    Operation("query and key norm, rotary, KV write", "moewe_qkv_epilogue"),
    Operation("attention, KV in bf16, fp8 or int8", "moewe_attention", matrix=True),
    Operation("latent attention: one product a head", "moewe_head_linear", matrix=True),
    Operation("latent attention: rotary and KV write", "moewe_latent_rows"),
    Operation("routing", "moewe_route"),
    Operation("experts", "moewe_expert_ffn", matrix=True),
    Operation("expert layer, combine included", "moewe_expert_ffn_combine", matrix=True),
    Operation("combine", "moewe_combine"),
    Operation("exchange between ranks of one host", "moewe_shm_publish"),
    Operation("most likely token, finite rows", "moewe_scan_rows"),
    Operation("sampling", "moewe_draw_rows"),
    Operation("log-probabilities", "moewe_row_logprobs"),
    Operation("quantising weights at load", "moewe_quantize"),
)
# Functions of the library that are no operation of a model, or only a part of one.
OTHER_FUNCTIONS = (
    "moewe_isa", "moewe_set_threads", "moewe_pack", "moewe_pack_codes", "moewe_read_rate", "moewe_matrix_rate",
    "moewe_shm_wait_published", "moewe_shm_collect", "moewe_shm_computed", "moewe_shm_wait_computed",
)  # fmt: skip
