"""What is left open becomes numbers; what cannot run is refused before anything starts."""

from __future__ import annotations

from unittest.mock import create_autospec

import msgspec
import pytest
import torch

from moewe.native.library import Outcome
from moewe.quant import parse_format
from moewe.runtime import resolve as resolve_module
from moewe.runtime.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ScheduleOptions
from moewe.runtime.kv_layout import kv_layout, step_limits
from moewe.runtime.messages import KVAllocated, Loaded
from moewe.runtime.processes.launch import EngineStart
from moewe.runtime.prompts import model_tokenizer
from moewe.runtime.ranges import DTYPES
from moewe.runtime.resolve import check_checkpoint, kv_blocks, rank_cpus, resolve
from moewe.runtime.scheduling.limits import GroupLimits
from moewe.runtime.start_up import check_blocks, stall_limits
from moewe.topologies import KVGroup, StepLimits
from moewe.topologies.kv_sizes import table_bytes
from tests.support.chain import FIRST_ID, chain
from tests.support.fixtures import checkpoint, copy_checkpoint, drop_tensors
from tests.support.native import needs_native
from tests.support.quantised import mxfp4_checkpoint


@pytest.fixture
def host(monkeypatch):
    """A host of 8 cores and as much memory as a test wants."""

    def size(num_bytes):
        monkeypatch.setattr(resolve_module, "host_memory_bytes", lambda: num_bytes)
        monkeypatch.setattr(resolve_module, "available_memory_bytes", lambda: num_bytes)

    monkeypatch.setattr(resolve_module, "host_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(resolve_module, "numa_nodes", lambda: [[0, 1, 2, 3], [4, 5, 6, 7]])
    size(64 << 30)
    return size


def config(topology="EP2DP1", **sections):
    made = EngineConfig(
        model=ModelOptions(model="T-QW3", path=str(checkpoint("T-QW3"))), parallel=ParallelOptions(topology=topology)
    )
    for section, values in sections.items():
        made = msgspec.structs.replace(made, **{section: msgspec.structs.replace(getattr(made, section), **values)})
    return made


def test_auto_becomes_numbers(host):
    found = resolve(config("ep2dp2"))
    assert found.config.model.dtype == "float32"
    assert found.config.model.max_model_len == found.model.max_position_embeddings
    assert found.config.parallel.topology == "EP2DP2[adp=2,atp=1,red=0]"
    assert found.config.parallel.threads == 2
    assert not found.fixed_max_model_len
    assert found.cpus == ()
    useful = 64 * -(-found.model.max_position_embeddings // 16)
    assert found.config.cache.num_blocks == useful == found.budget.num_blocks


def block_bytes(budget):
    """Return the bytes of one KV block in every group."""
    return budget.limits.block_size * sum(group.bytes_per_token for group in budget.kv_groups)


def test_resolving_twice_changes_nothing(host):
    first = resolve(config())
    assert resolve(first.config).config == first.config


@needs_native
def test_quantised_weights_are_weighed_as_such(host):
    plain, path = {"dtype": "bfloat16"}, str(checkpoint("T-MIX"))
    whole = resolve(config("EP1DP1", model={"path": path, **plain}))
    for name in ("int8", "int4"):
        found = resolve(config("EP1DP1", model={"path": path, "quantization": name, **plain}))
        assert found.footprint.expert_bytes < whole.footprint.expert_bytes
        assert found.footprint.embedding_bytes == whole.footprint.embedding_bytes
        assert found.config.model.quantization == name


def test_what_cannot_be_quantised_is_refused(host, monkeypatch):
    def refused(**model):
        with pytest.raises(ValueError, match="quantization=") as caught:
            resolve(config("EP1DP1", model=model))
        return str(caught.value)

    assert "computes in bfloat16, not in float32; use --dtype bfloat16" in refused(quantization="int8")
    assert "use int8 or int4" in refused(quantization="awq")
    stored, _ = mxfp4_checkpoint("T-GOS", intermediate_size=64)
    fix = "quantised already (mxfp4); leave quantization out"
    assert fix in refused(path=str(stored), quantization="int4", dtype="bfloat16")
    with pytest.raises(ValueError, match="for a CPU only"):
        resolve(config("EP1DP1", model={"quantization": "int8"}, parallel={"device": "cuda"}))
    monkeypatch.setattr(resolve_module, "outcome", lambda: Outcome(None, None, "MOEWE_NATIVE=0"))
    why = refused(quantization="int8", dtype="bfloat16")
    assert "needs the native kernels, which are not used here: MOEWE_NATIVE=0; see `moewe doctor`" in why


def test_little_memory_lowers_the_length(host):
    open_ended = resolve(config())
    block = block_bytes(open_ended.budget)
    small = 2 * (open_ended.budget.fixed_bytes + 5 * block)
    host(int(small / 0.9) + 4096)
    found = resolve(config())
    assert found.config.cache.num_blocks == 5
    assert found.config.model.max_model_len == 80
    with pytest.raises(ValueError, match="max_model_len=100"):
        resolve(config(model={"max_model_len": 100}))
    host(1 << 20)
    with pytest.raises(ValueError, match="T-QW3 on EP2DP1 needs"):
        resolve(config())


def test_kv_that_nobody_sized_is_modest_but_holds_a_sequence(host):
    block = block_bytes(resolve(config()).budget)
    many = {"max_num_seqs": 512}
    host(256 << 20 << 3)
    assert resolve(config(schedule=many)).config.cache.num_blocks == (256 << 20) // 2 // block
    assert resolve(config(cache={"block_size": 256}, schedule={"max_num_seqs": 1})).config.cache.num_blocks == 16


@pytest.fixture
def gpus(monkeypatch):
    def have(*sizes):
        monkeypatch.setattr(resolve_module, "gpu_memory_bytes", lambda: sizes)

    return have


@pytest.mark.parametrize(("build", "said"), [(None, "needs a CUDA build of torch"), ("13.0", "torch sees no GPU")])
def test_a_machine_without_gpus_is_told_so_in_one_line(build, said, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", create_autospec(torch.cuda.is_available, return_value=False))
    with pytest.raises(ValueError, match=f"device='cuda'.* {said}.* use --device cpu$") as raised:
        resolve(config(parallel={"device": "cuda"}))
    assert "\n" not in str(raised.value)


def test_gpus_are_counted_and_weighed(host, gpus):
    gpus(4 << 30, 2 << 30)
    found = resolve(config(parallel={"device": "cuda"}))
    assert found.budget.rank_memory_bytes == int((2 << 30) * 0.9)
    assert found.config.cache.num_blocks is None  # the rank sets it by what it has left
    with pytest.raises(ValueError, match=r"needs 4 GPUs \(2 x 2\), this machine has 2; did you mean EP2DP1"):
        resolve(config("EP2DP2", parallel={"device": "cuda"}))
    gpus(300 << 20)
    with pytest.raises(ValueError, match=r"needs .* a rank before any KV"):
        resolve(config("EP1DP1", parallel={"device": "cuda"}))


def test_a_small_gpu_lowers_the_length_unless_it_was_asked_for(host, gpus):
    whole = resolve(config("EP1DP1")).budget
    fixed_bytes = whole.fixed_bytes + table_bytes(len(whole.kv_groups), whole.limits)
    gpus(int((fixed_bytes + 5 * block_bytes(whole)) / 0.9) + 4096)
    eager = {"parallel": {"device": "cuda"}, "graphs": {"enforce_eager": True}}
    assert resolve(config("EP1DP1", **eager)).budget.limits.max_model_len == 80
    asked = whole.limits.max_model_len
    with pytest.raises(ValueError, match=f"max_model_len={asked:,}"):
        resolve(config("EP1DP1", model={"max_model_len": asked}, **eager))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_is_one_line(host):
    with pytest.raises(ValueError, match=r"device='cuda'.*use --device cpu"):
        resolve(config("EP1DP1", parallel={"device": "cuda"}))


def test_exact_numbers_win(host):
    assert resolve(config(cache={"num_blocks": 7}, model={"max_model_len": 64})).config.cache.num_blocks == 7
    block = block_bytes(resolve(config()).budget)
    kv = {"kv_cache_memory_bytes": 9 * block + block // 2}
    assert resolve(config(cache=kv, model={"max_model_len": 64})).config.cache.num_blocks == 9
    assert resolve(config(parallel={"threads": 3})).config.parallel.threads == 3


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("5,2", 5), ("", 4), ("0", 4), ("-1", 4), ("many", 4)])
def test_threads_are_those_that_openmp_was_told_unless_the_flag_says_otherwise(host, monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert resolve(config()).config.parallel.threads == threads
    assert resolve(config(parallel={"threads": 2})).config.parallel.threads == 2


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("model", {"dtype": "int3"}, "int3"),
        ("model", {"load_format": "pickle"}, "load_format='pickle'"),
        ("model", {"max_model_len": 1}, "max_model_len=1"),
        ("model", {"max_model_len": 1 << 30}, "use at most"),
        ("parallel", {"topology": "EP3"}, "EPxDPy"),
        ("parallel", {"topology": "EP512DP1"}, "512"),
        ("parallel", {"device": "tpu"}, "device='tpu'"),
        ("parallel", {"ranks": "fibers"}, "ranks='fibers'"),
        ("parallel", {"threads": 0}, "threads=0"),
        ("cache", {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ("cache", {"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        ("cache", {"kv_cache_memory_bytes": 1}, "KV of 0 B"),
        ("cache", {"block_size": 0}, "block_size=0"),
        ("cache", {"num_blocks": 0}, "num_blocks=0"),
        ("schedule", {"policy": "lifo"}, "policy='lifo'"),
        ("schedule", {"max_num_batched_tokens": 8}, "max_num_batched_tokens=8"),
        ("schedule", {"stall_timeout_s": 0.0}, "stall_timeout_s=0.0"),
    ],
)
def test_mistake_is_refused_in_one_line_with_value_and_fix(host, section, values, says):
    with pytest.raises(ValueError, match=r".") as error:
        resolve(config(**{section: values}))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_cores_of_a_node_go_to_neighbouring_ranks(host):
    assert rank_cpus([[0, 1, 2, 3], [4, 5, 6, 7]], 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert rank_cpus([[0, 1, 2, 3], [4, 5, 6, 7]], 1) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert rank_cpus([[0, 1], [4, 5]], 2) == ((0, 1), (4, 5))
    assert rank_cpus([[0]], 2) == ((0,), (0,))
    assert [len(cpus) for cpus in rank_cpus([[0, 1, 2], [3, 4, 5]], 3)] == [3, 1, 2]
    found = resolve(config("EP2DP2", parallel={"numa_bind": True}))
    assert found.cpus == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.config.parallel.threads == 2


def test_kv_blocks_order_of_precedence():
    groups = (KVGroup(name="full", kind="full", bytes_per_token=2),)  # blocks of 10 bytes
    few, many = (StepLimits(max_num_batched_tokens=8, max_model_len=10, max_num_seqs=n, block_size=5) for n in (3, 50))
    assert kv_blocks(CacheOptions(num_blocks=3, kv_cache_memory_bytes=1000), groups, few, free_bytes=100) == 3
    assert kv_blocks(CacheOptions(kv_cache_memory_bytes=1000), groups, few, free_bytes=100) == 100
    assert kv_blocks(CacheOptions(), groups, few, free_bytes=100) == 6
    assert kv_blocks(CacheOptions(), groups, many, free_bytes=100) == 10
    assert kv_blocks(CacheOptions(), groups, many, free_bytes=-1) == 0


def engine_start(**changes):
    options = ModelOptions(model="m", path="m", max_model_len=100)
    fields = {"config": EngineConfig(model=options), "replica": 0, "num_layers": 10, "vocab_size": 50,
              "eos_token_ids": (), "kv_groups": (KVGroup(name="full", kind="full", bytes_per_token=1),)}  # fmt: skip
    return EngineStart(**fields | changes)


def test_engine_refuses_a_pool_below_the_length_that_was_asked_for():
    check_blocks(engine_start(), 3)
    check_blocks(engine_start(fixed_max_model_len=True), 7)
    with pytest.raises(ValueError, match="holds 48 tokens, less than max_model_len=100; use --max-model-len 48"):
        check_blocks(engine_start(fixed_max_model_len=True), 3)
    with pytest.raises(ValueError, match="no memory is left for KV"):
        check_blocks(engine_start(), 0)


def test_patience_grows_with_the_time_of_a_layer():
    def rank(weight_bytes):
        loaded = Loaded(rank=0, num_blocks=1, weight_bytes=weight_bytes, weight_bytes_read=0, pid=1)
        return loaded, KVAllocated(rank=0, memory_bandwidth=1e9)

    assert stall_limits(engine_start(), [rank(1000)]).stall_s == ScheduleOptions().stall_timeout_s
    assert stall_limits(engine_start(), [rank(1000), rank(10**9)]).stall_s == 4 * 0.1 * 128


def test_what_reads_like_a_slip_is_said_only_when_it_runs(host, caplog):
    resolve(config("EP2DP2"))
    assert sum("did you mean EP2DP1" in line for line in caplog.messages) == 1
    caplog.clear()
    with pytest.raises(ValueError, match="block_size"):
        resolve(config("EP2DP2", cache={"block_size": 0}))
    assert not caplog.messages


@pytest.mark.parametrize("name", DTYPES)
def test_every_spelling_of_a_dtype_is_a_format(name):
    assert parse_format(name).name in ("bfloat16", "float16", "float32")


@pytest.mark.parametrize(("own", "asked", "warns"), [("bfloat16", "float16", True), ("bfloat16", "auto", False),
                                                   ("float32", "float16", False)])  # fmt: skip
def test_float16_for_a_bfloat16_checkpoint_is_warned_of(host, caplog, own, asked, warns):
    path = str(checkpoint("T-QW3", dtype=own))
    resolve(config(model={"path": path, "dtype": asked}))
    assert any("whose values may be too large" in line for line in caplog.messages) == warns


def test_kv_of_windows_is_sized_logged_and_reaches_the_length(host, caplog):
    caplog.set_level("INFO")
    windowed = {"model": {"path": str(checkpoint("T-GOS"))}}
    found = resolve(config(**windowed))
    window, full = found.budget.group_blocks
    assert full == found.config.cache.num_blocks > window == 64 * 2 + 512 // 16 + 64
    assert any(f"KV: window8 {window}, full {full} blocks of 16 tokens a rank" in line for line in caplog.messages)
    assert found.config.model.max_model_len == found.model.max_position_embeddings
    layout = kv_layout(found.footprint.kv_groups, step_limits(found.config), 5)
    assert layout.num_blocks == (5, 5) and layout.max_model_len == 80
    assert layout.groups == (GroupLimits(num_blocks=5, kind="window", window=8), GroupLimits(num_blocks=5))


def test_latent_kv_is_as_wide_as_its_rows(host):
    found = resolve(config(model={"path": str(checkpoint("T-DS2"))}))
    latent = found.model.latent
    assert (
        sum(group.bytes_per_token for group in found.footprint.kv_groups)
        == (latent.kv_rank + latent.rope_dim) * found.model.num_layers * 4
    )


@pytest.mark.parametrize("asked", ["auto", "float32", "fp32"])
def test_kv_may_be_named_in_the_format_of_the_model(host, asked):
    assert resolve(config(cache={"kv_cache_dtype": asked})).config.cache.kv_cache_dtype == "float32"


@pytest.mark.parametrize("asked", ["fp8_e5m2", "int4", "float16", ""])
def test_kv_in_another_format_is_refused(host, asked):
    with pytest.raises(ValueError, match=f"kv_cache_dtype='{asked}' is not available.*auto, float32, bfloat16, fp8"):
        resolve(config(cache={"kv_cache_dtype": asked}))


@pytest.mark.parametrize("asked", ["fp8", "int8", "fp8_e4m3"])
def test_the_same_memory_holds_nearly_twice_the_blocks_of_kv_in_a_byte(host, caplog, asked):
    """T-QW3: 2 layers with 2 heads of 32, so K and V of a token are 256 numbers and 8 scales."""

    def blocks(kv_cache_dtype):
        cache = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory_bytes": 1 << 20}
        with caplog.at_level("INFO", "moewe.runtime.resolve"):
            return resolve(config(model={"dtype": "bfloat16", "max_model_len": 64}, cache=cache))

    plain, scaled = blocks("auto"), blocks(asked)
    assert plain.config.cache.num_blocks == (1 << 20) // (16 * 512)
    assert scaled.config.cache.num_blocks == (1 << 20) // (16 * (256 + 8 * 2))
    assert [group.bytes_per_token for group in scaled.footprint.kv_groups] == [256 + 8 * 2]
    assert scaled.budget.kv_bytes == scaled.config.cache.num_blocks * 16 * (256 + 8 * 2)
    name = scaled.config.cache.kv_cache_dtype
    assert any(line.startswith("KV: full ") and line.endswith(f"bytes, {name}") for line in caplog.messages)


def test_kv_that_no_kernel_reads_in_place_is_said_to_be_slow(host, caplog):
    resolve(config(cache={"kv_cache_dtype": "int8"}))
    assert any("kv_cache_dtype int8: torch turns each block" in line for line in caplog.messages)


def test_a_tokenizer_that_would_not_be_loaded_is_refused(host):
    with pytest.raises(ValueError, match="tokenizer='x' is not allowed; skip_tokenizer_init loads none"):
        resolve(config(model={"tokenizer": "x", "skip_tokenizer_init": True}))


def test_damaged_checkpoints_are_known_from_headers_alone(host):
    no_text = {"skip_tokenizer_init": True}
    check_checkpoint(resolve(config(model=no_text)))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        check_checkpoint(resolve(config()))
    folder = drop_tensors(copy_checkpoint(checkpoint("T-QW3")), "lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        check_checkpoint(resolve(config(model={"path": str(folder)})))
    check_checkpoint(resolve(config(model=no_text | {"path": str(folder), "load_format": "dummy"})))


def test_tokenizers_come_from_one_place(host):
    """The model's folder is its revision already; another tokenizer has revisions of its own."""
    own, other = chain(["a"]).path, chain(["b"]).path
    options = ModelOptions(model=str(own), path=str(own), revision="main")
    assert model_tokenizer(options).decode([FIRST_ID]) == "a"
    replaced = msgspec.structs.replace(options, tokenizer=str(other))
    assert model_tokenizer(replaced).decode([FIRST_ID]) == "b"
    same = msgspec.structs.replace(options, model="owner/name", tokenizer="owner/name")
    assert model_tokenizer(same).decode([FIRST_ID]) == "a"
    assert model_tokenizer(msgspec.structs.replace(options, skip_tokenizer_init=True)) is None


def test_an_exchange_that_cannot_work_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="exchange='hierarchical' needs a group that spans domains"):
        resolve(config("EP2DP1", parallel={"exchange": "hierarchical"}))
    with pytest.raises(ValueError, match="exchange='nccl' is not allowed; use auto, shm"):
        resolve(config("EP2DP1", parallel={"exchange": "nccl"}))
    with pytest.raises(ValueError, match="exchange_payload='int8' is not allowed; use auto or fp8"):
        resolve(config("EP2DP1", parallel={"exchange_payload": "int8"}))
    with pytest.raises(ValueError, match="overlap='on' is for rows on links"):
        resolve(config("EP2DP1", parallel={"overlap": "on"}))
    with pytest.raises(ValueError, match="overlap='maybe' is not allowed; use auto, on, off"):
        resolve(config("EP2DP1", parallel={"overlap": "maybe"}))
    found = resolve(config("EP2DP1[domains=1+1,rate=9]", parallel={"exchange": "hierarchical", "overlap": "on"}))
    assert found.config.parallel.topology == "EP2DP1[adp=2,atp=1,red=0,domains=1+1,rate=9]"
