"""Which weight files count, and what a damaged or hostile one is answered with."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file

from moewe.models.checkpoint import find_shards, open_checkpoint
from moewe.models.config import ConfigError
from tests.support.fixtures import checkpoint, copy_checkpoint, edit_json, new_folder, read_tensors

INDEX = "model.safetensors.index.json"


def refusal(folder):
    with pytest.raises(ConfigError) as caught, open_checkpoint(folder):
        pass
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    return message


def sharded():
    return copy_checkpoint(checkpoint("T-MIX", shards=4))


def write_raw(header, data=b"", length=None):
    folder = new_folder("raw")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(size + text + data)
    return folder


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("shards", [1, 4])
def test_every_tensor_is_found_where_it_lies(shards):
    folder = checkpoint("T-MIX", shards=shards)
    with open_checkpoint(folder) as found:
        assert found.strays == ()
        expected = read_tensors(folder)
        assert found.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            stored = found.tensors[name]
            assert stored.dtype == "F32" and stored.shape == tuple(tensor.shape)
            data = bytearray(stored.num_bytes)
            stored.file.read_into(memoryview(data), stored.offset)
            assert bytes(data) == tensor.numpy().tobytes()


def test_files_are_closed_after_use_and_after_a_refusal():
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(checkpoint("T-MIX", shards=4)):
        pass
    folder = sharded()
    (folder / "model-00004-of-00004.safetensors").write_bytes(b"short")
    refusal(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_absent_shards_are_listed():  # P-LOAD-03
    folder = sharded()
    (folder / "model-00003-of-00004.safetensors").unlink()
    (folder / "model-00002-of-00004.safetensors").unlink()
    message = refusal(folder)
    assert "model-00003-of-00004.safetensors" in message and "model-00002-of-00004.safetensors" in message
    assert "model-00001" not in message and "incomplete download" in message


def test_stray_files_are_named_and_not_opened():  # P-LOAD-04
    folder = sharded()
    (folder / "consolidated.safetensors").write_bytes(b"garbage that would be refused")
    (folder / "pytorch_model.bin").write_bytes(b"garbage")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in read_tensors(checkpoint("T-MIX", shards=4)).items()}
    save_file(zeros, folder / "model.safetensors")
    with open_checkpoint(folder) as found:
        assert set(found.strays) == {"consolidated.safetensors", "model.safetensors", "pytorch_model.bin"}
        assert {tensor.file.path.name for tensor in found.tensors.values()} == set(find_shards(folder).files)


@pytest.mark.parametrize("payload", [b"\x80\x04N.", None], ids=["plain", "code"])
def test_pickled_weights_are_refused_unopened(payload, tmp_path):  # P-LOAD-25
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    folder = copy_checkpoint(checkpoint("T-MIX"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(payload or pickle.dumps(Evil()))
    message = refusal(folder)
    assert "pytorch_model.bin" in message and "save_pretrained" in message and not marker.exists()


HOSTILE_NAMES = ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "a\0.safetensors"]
HOSTILE_NAMES += [
    "..",
    ".",
    "",
    "x" * 300 + ".safetensors",
    "config.json",
    3,
    None,
    ["a.safetensors"],
    "a\n.safetensors",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_index_entries_must_be_plain_names(name):  # P-SEC-03
    folder = sharded()
    shutil.copy(folder / "model-00001-of-00004.safetensors", folder.parent / "x.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    assert "plain name" in refusal(folder)


def test_links_into_a_shared_store_are_followed(tmp_path):
    folder = copy_checkpoint(checkpoint("T-MIX"))
    shutil.move(folder / "model.safetensors", tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    with open_checkpoint(folder) as found:
        assert "model.norm.weight" in found.tensors


@pytest.mark.parametrize("weight_map", [None, {}, [1], "x"])
def test_an_index_without_map_is_refused(weight_map):
    folder = sharded()
    edit_json(folder / INDEX, {"weight_map": weight_map})
    assert "weight_map" in refusal(folder)


def test_index_and_files_must_agree():
    folder = sharded()
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    assert "'model.norm.weight'" in refusal(folder)
    index["weight_map"] |= {"model.norm.weight": file, "model.more.weight": file}
    (folder / INDEX).write_text(json.dumps(index))
    assert "model.more.weight" in refusal(folder)


def test_shards_without_an_index_are_refused():
    folder = sharded()
    (folder / INDEX).unlink()
    assert INDEX in refusal(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    assert "no weights" in refusal(tmp_path)
    assert "cannot list" in refusal(tmp_path / "absent")
    os.mkfifo(tmp_path / "model.safetensors")
    assert "regular file" in refusal(tmp_path)


HOSTILE_FILES = {
    "empty": lambda: write_raw(b"", length=0),
    "header beyond the file": lambda: write_raw({}, length=1 << 40),
    "header of 2^64-1": lambda: write_raw({}, length=(1 << 64) - 1),
    "half a header": lambda: write_raw(b'{"a": {"dtype"'),
    "list": lambda: write_raw([1]),
    "entry is a number": lambda: write_raw({"a": 1}),
    "no shape": lambda: write_raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "unknown dtype": lambda: write_raw({"a": entry(dtype="F128")}, bytes(8)),
    "dtype is a list": lambda: write_raw({"a": entry(dtype=["F32"])}, bytes(8)),
    "negative dimension": lambda: write_raw({"a": entry(shape=(-2, -1))}, bytes(8)),
    "dimension is a string": lambda: write_raw({"a": {**entry(), "shape": "2"}}, bytes(8)),
    "dimension is true": lambda: write_raw({"a": entry(shape=(True,), end=4)}, bytes(4)),
    "dimension is a fraction": lambda: write_raw({"a": entry(shape=(2.0,))}, bytes(8)),
    "huge dimensions": lambda: write_raw({"a": entry(shape=(1 << 61, 1 << 61))}, bytes(8)),
    "many dimensions": lambda: write_raw({"a": entry(shape=(1,) * 9 + (2,))}, bytes(8)),
    "bytes do not fit the shape": lambda: write_raw({"a": entry(end=12)}, bytes(12)),
    "beyond the file": lambda: write_raw({"a": entry()}, bytes(4)),
    "begin after end": lambda: write_raw({"a": entry(begin=8, end=0)}, bytes(8)),
    "negative offset": lambda: write_raw({"a": entry(begin=-8, end=0)}, bytes(8)),
    "three offsets": lambda: write_raw({"a": {**entry(), "data_offsets": [0, 4, 8]}}, bytes(8)),
    "overlap": lambda: write_raw({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
    "gap": lambda: write_raw({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)),
    "bytes after the last tensor": lambda: write_raw({"a": entry()}, bytes(9)),
    "a name twice": lambda: write_raw(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_damaged_files_are_refused(case):
    assert "model.safetensors" in refusal(HOSTILE_FILES[case]())


def test_a_truncated_file_is_called_an_incomplete_download():
    folder = copy_checkpoint(checkpoint("T-MIX"))
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(folder / "model.safetensors") - 1)
    assert "incomplete download" in refusal(folder)


def test_a_file_that_shrinks_while_it_is_read_is_noticed():
    folder = copy_checkpoint(checkpoint("T-MIX"))
    with open_checkpoint(folder) as found:
        stored = found.tensors["model.norm.weight"]
        os.truncate(folder / "model.safetensors", stored.offset + 4)
        with pytest.raises(ConfigError, match="ended early"):
            stored.file.read_into(memoryview(bytearray(stored.num_bytes)), stored.offset)
