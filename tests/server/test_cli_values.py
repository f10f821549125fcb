"""Words of a command line and of a `--config` file: kinds, precedence, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewe.runtime.options import engine_config, layout_config, option_names
from moewe.runtime.params import SamplingParams
from moewe.server.flags.table import ENGINE, HTTP, SAMPLE, SHARED, flags_of, without_aliases
from moewe.server.flags.values import Settings, parse_bytes, read_settings
from moewe.server.options import ServerOptions

SERVE = tuple(flags_of(ENGINE, HTTP, SHARED))


def settings(**given: Any) -> Settings:
    return read_settings(SERVE, {"model_argument": "m", **given})


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("512MiB", 512 << 20),
        ("4GB", 4 * 10**9),
        ("4G", 4 << 30),
        ("1.5 kib", 1536),
        ("2tb", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XB", "1e9", "ten"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


def test_every_flag_fills_a_field_of_its_owner() -> None:
    fields = {
        ENGINE: set(option_names()),
        HTTP: set(ServerOptions.__struct_fields__),
        SAMPLE: set(SamplingParams.__struct_fields__),
    }
    for group, known in fields.items():
        assert {flag.target for flag in flags_of(group)} <= known
    # What no flag sets must be on this list, so that a new field cannot be forgotten.
    assert fields[ENGINE] - {flag.target for flag in flags_of(ENGINE)} == {"path", "num_blocks"}
    assert fields[HTTP] == {flag.target for flag in flags_of(HTTP)}
    assert fields[SAMPLE] - {flag.target for flag in flags_of(SAMPLE)} == {
        "bad_word_tokens", "bad_words", "include_stop_str_in_output", "logit_bias", "logprobs", "min_tokens", "n",
        "prompt_logprobs", "seed", "skip_special_tokens", "stop_token_ids", "structured",
    }  # fmt: skip


def test_printed_defaults_are_the_real_ones() -> None:
    engine, http = engine_config({"model": "m"}), ServerOptions()
    parts = (engine.model, engine.parallel, engine.cache, engine.schedule, engine.graphs)
    real = {name: getattr(part, name) for part in parts for name in part.__struct_fields__}
    for flag in flags_of(ENGINE, HTTP):
        value = getattr(http, flag.target) if flag.group == HTTP else real[flag.target]
        if value not in (None, (), False) and flag.name != "model":
            assert flag.default.split(",")[0] in (str(value), f"{value:g}" if isinstance(value, float) else "", "16MiB")


def test_command_line_wins_over_file_over_default(tmp_path: Path) -> None:
    path = config(tmp_path, "max-num-seqs: 7\nmax_model_len: 100\nport: 9000\napi-key: k\nnuma-bind: true\n")
    made = settings(config=path, max_num_seqs="9", kv_cache_memory_bytes="1MiB")
    assert made.engine == {
        "model": "m", "max_num_seqs": 9, "max_model_len": 100, "kv_cache_memory_bytes": 1 << 20, "numa_bind": True,
    }  # fmt: skip
    assert made.http == {"port": 9000, "api_keys": ("k",)}
    assert settings(config=path, numa_bind=False).engine["numa_bind"] is False


def test_file_takes_aliases_and_the_model(tmp_path: Path) -> None:
    path = config(tmp_path, "model-path: here\ncontext-length: 64\nserved-model-name: [a, b]\n")
    made = read_settings(SERVE, {"config": path})
    assert made.engine == {"model": "here", "max_model_len": 64}
    assert made.http == {"served_model_name": ("a", "b")}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max-model-length: 3\n", "did you mean max-model-len?"),
        ("banana: 3\n", "moewe serve --help lists all"),
        ("max-model-len: many\n", "use a whole number"),
        ("max-model-len: 1.5\n", "use a whole number"),
        ("max-model-len: true\n", "use one value"),
        ("port: [1]\n", "use one value"),
        ("gpu-memory-utilization: x\n", "use a number"),
        ("numa-bind: 3\n", "use true or false"),
        ("served-model-name: [1]\n", "use text"),
        ("kv-cache-memory-bytes: 1 lot\n", "512MiB"),
        ("max-model-len: 3\ncontext-length: 4\n", "a second time"),
        ("max-model-len: 3\nmax-model-len: 4\n", "given twice"),
        ("- a\n", "must be a mapping"),
        ("config: other.yaml\n", "names a further file"),
    ],
)
def test_wrong_files_name_key_and_file(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ValueError) as error:
        settings(config=config(tmp_path, text))
    assert word in str(error.value) and "c.yaml" in str(error.value)


def test_an_empty_file_is_fine_and_a_missing_one_is_not(tmp_path: Path) -> None:
    assert settings(config=config(tmp_path, "")).engine == {"model": "m"}
    with pytest.raises(ValueError, match="No such file"):
        settings(config=str(tmp_path / "none.yaml"))


def test_the_model_is_given_once() -> None:
    assert read_settings(SERVE, {"model": "m"}).engine == {"model": "m"}
    with pytest.raises(ValueError, match="given twice"):
        settings(model="other")
    with pytest.raises(ValueError, match="no MODEL"):
        read_settings(SERVE, {})


def test_aliases_become_flags_before_a_double_dash() -> None:
    words = ["serve", "m", "--context-length", "5", "--max-running-requests=3", "--", "--context-length"]
    assert without_aliases(words) == [
        "serve", "m", "--max-model-len", "5", "--max-num-seqs=3", "--", "--context-length",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["--cuda-graph-sizes=1,2,4"], (1, 2, 4)),
        (["--cuda-graph-sizes", "1,2"], (1, 2)),
        (["--cuda-graph-bs", "1", "2", "4", "--port", "8"], (1, 2, 4)),
        (["--cudagraph-capture-sizes=16"], (16,)),
    ],
)
def test_sizes_of_graphs_as_other_servers_take_them(words: list[str], sizes: tuple[int, ...], tmp_path: Path) -> None:
    name, _, value = without_aliases(words)[0].partition("=")
    assert name == "--cuda-graph-sizes" and settings(cuda_graph_sizes=value).engine["cuda_graph_sizes"] == sizes
    listed = config(tmp_path, f"cuda_graph_sizes: {list(sizes)}\ndisable-cuda-graph: true\n")
    found = settings(config=listed).engine
    assert (found["cuda_graph_sizes"], found["enforce_eager"]) == (sizes, True)
    assert engine_config({"model": "m", "cuda_graph_sizes": list(sizes)}).graphs.cuda_graph_sizes == sizes


@pytest.mark.parametrize("value", ["1,x", "", "1.5", "1,,2"])
def test_sizes_of_graphs_are_whole_numbers(value: str) -> None:
    with pytest.raises(ValueError, match=r"--cuda-graph-sizes: .*use whole numbers, such as 1,2,4,8"):
        settings(cuda_graph_sizes=value)


@given(st.lists(st.text(max_size=12)))
def test_other_words_stay_as_they_are(words: list[str]) -> None:
    """Hypothesis draws from strings of the sources as well, so a flag may be among them."""
    others = [word for word in words if not word.startswith("--")]
    assert without_aliases(others) == others
    assert without_aliases(["--", *words]) == ["--", *words]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model": "m", "max_modellen": 1}, "did you mean max_model_len?"),
        ({"model": "m", "max_model_len": "5"}, "max_model_len='5'"),
        ({"model": "m", "threads": True}, "threads=True"),
        ({"model": 3}, "model=3"),
        ({"model": "m", "zebra": 1}, "known are"),
    ],
)
def test_engine_options_of_the_wrong_name_or_kind(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError) as error:
        engine_config(options)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_a_layout_becomes_one_topology_in_the_dialect_that_is_named() -> None:
    assert layout_config({"model": "m"}).parallel.topology == "EP1DP1[adp=1,atp=1,red=0]"
    for dialect, short in ((None, "EP8DP8"), ("moewe", "EP8DP8"), ("vllm", "EP8DP1")):
        made = layout_config({"model": "m", "topology": "EP8DP8"}, dialect=dialect)
        assert made.parallel.topology.startswith(f"{short}[")
