"""Random damage to a valid header or config: a refusal in one line or a sound result, in memory of the file's size.

Not the cases that somebody thought of (test_checkpoint.py, test_config.py): hypothesis looks for others.
Units: bytes.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moewe.models.config import ConfigError, ModelConfig
from moewe.models.families import load_config
from moewe.models.footprint import model_footprint
from moewe.models.safetensors_file import ITEMSIZES, SafetensorsFile
from tests.support.configs import saved_config

# Beside the text itself: what parsing makes of it (objects, sorted entries) and what Python keeps by itself.
PER_BYTE, FIXED = 64, 512 * 1024
RUNS = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

HUGE = [2**31, 2**53, 2**61, 2**62, 2**63, 2**64, 10**30, 10**400]
NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from(HUGE + [-n for n in HUGE]), st.floats(), st.sampled_from([1e308, -0.0, 0.5])
)
TEXTS = st.one_of(
    st.text(max_size=6), st.sampled_from(["../x", "/etc/passwd", "a\x00b", "\n", "F32", "auto", "\ud800"])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside `value`."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> Any:
    """Draw `good` with one to three values replaced, removed, added, or moved to another place."""
    made = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(made))
        if not found:
            break
        *path, last = draw(st.sampled_from(found))
        holder = made
        for step in path:
            holder = holder[step]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "copy"]))
        if kind == "replace":
            holder[last] = draw(VALUES)
        elif kind == "remove":
            del holder[last]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(TEXTS)] = draw(VALUES)
        else:
            *other, end = draw(st.sampled_from(found))
            source = made
            try:
                for step in (*other, end):
                    source = source[step]
            except (LookupError, TypeError):
                continue
            holder[last] = json.loads(json.dumps(source))
    return made


def within_memory(size: int, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, None where it refuses in one line; fail on anything else, and on too much memory."""
    tracemalloc.start()
    try:
        result = work()
    except ConfigError as error:
        result = None
        assert "\n" not in str(error) and len(str(error)) < 600, str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < FIXED + PER_BYTE * size, (peak, size)
    return result


# --- safetensors ------------------------------------------------------------------------------------------------------
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    "d": {"dtype": "I64", "shape": [0, 9], "data_offsets": [33, 33]},
}
DATA = bytes(33)


def file_of(path: Path, header: bytes, data: bytes = DATA, length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def opened(path: Path) -> Any:
    """Open a file and hold what it says against what it is."""

    def work() -> SafetensorsFile:
        file = SafetensorsFile(path)
        file.close()
        return file

    size = path.stat().st_size
    file = within_memory(size, work)
    for name, tensor in () if file is None else file.tensors.items():
        count = 1
        for dim in tensor.shape:
            assert type(dim) is int and dim >= 0
            count *= dim
        assert isinstance(name, str) and tensor.num_bytes == count * ITEMSIZES[tensor.dtype]
        assert tensor.offset >= 8 and tensor.offset + tensor.num_bytes <= size
    return file


def test_the_header_that_is_damaged_below_is_a_good_one(tmp_path: Path) -> None:
    assert set(opened(file_of(tmp_path / "a", json.dumps(HEADER).encode())).tensors) == {"a", "b", "c", "d"}


@RUNS
@given(header=damaged(HEADER))
def test_damaged_headers(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    opened(file_of(tmp_path / "a", text))


@RUNS
@given(data=st.data())
def test_damaged_bytes_of_a_header(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(json.dumps(HEADER).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        piece = data.draw(st.binary(max_size=3) | st.sampled_from([b"[", b"{", b"9" * 30, b"[" * 3000, b'"', b"-"]))
        text[at : at + data.draw(st.integers(0, 9))] = piece
        text = text or bytearray(b"{")
    length = data.draw(st.none() | st.sampled_from([0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]))
    tail = data.draw(st.sampled_from([DATA, b"", DATA + b"x", DATA[:-1]]))
    opened(file_of(tmp_path / "a", bytes(text), tail, length))


@pytest.mark.parametrize("depth", [200, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_is_no_crash(tmp_path: Path, opening: str, depth: int) -> None:
    assert opened(file_of(tmp_path / "a", (opening * depth).encode())) is None
    deep = opening * depth + "1" + {"[": "]", '{"a":': "}"}[opening] * depth
    assert opened(file_of(tmp_path / "a", deep.encode())) is None


# --- config.json ------------------------------------------------------------------------------------------------------
FIXTURE_NAMES = ["T-MIX", "T-QW3", "T-DS3", "T-GOS", "T-LL4"]
KNOWN = {name: json.loads((saved_config(name) / "config.json").read_text()) for name in FIXTURE_NAMES}


def loaded(folder: Path, text: str) -> ModelConfig | None:
    """Load a config, and where it is taken, compute what it would cost: with numbers, without the memory."""
    (folder / "config.json").write_text(text, errors="surrogatepass")

    def work() -> ModelConfig:
        config = load_config(folder)
        model_footprint(config, name="x", dtype="float32")
        return config

    result: ModelConfig | None = within_memory(len(text), work)
    return result


@pytest.mark.parametrize("name", FIXTURE_NAMES)
@settings(RUNS, max_examples=30)
@given(data=st.data())
def test_damaged_configs(tmp_path: Path, name: str, data: st.DataObject) -> None:
    config = data.draw(damaged(KNOWN[name]))
    loaded(tmp_path, json.dumps(config))


@pytest.mark.parametrize("name", FIXTURE_NAMES)
@pytest.mark.parametrize("num_layers", [512, 1024])
def test_layers_by_the_hundred_cost_no_memory(tmp_path: Path, name: str, num_layers: int) -> None:
    by_layer = dict.fromkeys({"layer_types", "no_rope_layers"} & KNOWN[name].keys())  # None: as the family has it
    assert loaded(tmp_path, json.dumps(KNOWN[name] | by_layer | {"num_hidden_layers": num_layers})) is not None


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_every_field_by_every_odd_value(tmp_path: Path, name: str) -> None:
    odd = [None, True, -1, 0, 2**63, 10**30, 1e308, "", "x", [], [[]], {}, {"a": 1}, [-1] * 9]
    for field in KNOWN[name]:
        for value in odd:
            loaded(tmp_path, json.dumps(KNOWN[name] | {field: value}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        "null",
        '"a"',
        "{",
        '{"a": NaN}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"model_type": "' + "x" * 10**6,
    ],
)
def test_what_is_no_config_at_all_is_refused(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text) is None
