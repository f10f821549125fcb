"""Traces on disk: what was written comes back, and a file from a stranger is refused in one line."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from moewe.moe.wide_ep.traces import RoutingTrace, load_trace, save_trace

HEADER = np.array([1, 6, 1], np.int64)


def trace(num_experts: int = 6, num_groups: int = 1) -> RoutingTrace:
    rng = np.random.default_rng(0)
    ids = {
        phase: rng.integers(-1, num_experts, (3, tokens, 2), np.int32)
        for phase, tokens in (("prefill", 9), ("decode", 4))
    }
    return RoutingTrace(num_experts=num_experts, num_groups=num_groups, ids=ids)


@pytest.mark.parametrize("num_experts", [6, 70_000])
def test_what_was_saved_is_loaded(tmp_path: Path, num_experts: int) -> None:
    saved = trace(num_experts, num_groups=2)
    path = tmp_path / "routing"
    save_trace(saved, path)
    loaded = load_trace(path)
    assert (loaded.num_experts, loaded.num_groups, loaded.num_layers, loaded.top_k) == (num_experts, 2, 3, 2)
    assert list(loaded.ids) == ["prefill", "decode"]
    for phase, ids in saved.ids.items():
        assert loaded.ids[phase].dtype == np.int32
        assert np.array_equal(loaded.ids[phase], ids)


def test_windows_and_loads() -> None:
    ids = np.array([[[0, 1], [0, 2], [-1, 0], [3, 0], [1, 2]]], np.int32)
    recorded = RoutingTrace(num_experts=4, ids={"decode": ids})
    assert recorded.num_tokens("decode") == 5 and recorded.num_tokens("prefill") == 0
    assert [window.tolist() for window in recorded.windows("decode", 2)] == [ids[:, :2].tolist(), ids[:, 2:4].tolist()]
    assert recorded.load("decode").tolist() == [[4, 2, 2, 1]]


def written(path: Path, **arrays: np.ndarray) -> Path:
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


GOOD = np.zeros((1, 2, 2), np.int32)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"prefill": GOOD}, "must hold header and phases, not prefill"),
        ({"header": HEADER}, "phases prefill, decode, got none"),
        ({"header": HEADER, "prefill": GOOD, "extra": GOOD}, "not extra, header, prefill"),
        ({"header": HEADER + 1, "prefill": GOOD}, "unknown header"),
        ({"header": HEADER[:2], "prefill": GOOD}, "unknown header"),
        ({"header": HEADER.astype(float), "prefill": GOOD}, "header.npy must be int64, got float64"),
        ({"header": HEADER, "prefill": GOOD.astype(np.int64)}, "must be int16 or int32, got int64"),
        ({"header": HEADER, "prefill": GOOD.astype(np.float32)}, "must be int16 or int32, got float32"),
        ({"header": HEADER, "prefill": GOOD[0]}, r"prefill must be i32 \[layers, tokens, top-k\]"),
        ({"header": HEADER, "prefill": GOOD + 6}, "prefill has ids from 6 to 6; use -1 to 5"),
        ({"header": HEADER, "prefill": GOOD - 2}, "ids from -2 to -2"),
        ({"header": HEADER, "prefill": GOOD, "decode": np.zeros((2, 2, 2), np.int32)}, "same layers and top-k"),
        ({"header": np.array([1, 6, 4]), "prefill": GOOD}, "num_groups must divide num_experts=6, got 4"),
        ({"header": np.array([1, 0, 1]), "prefill": GOOD}, "num_experts must be in"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, arrays: dict[str, np.ndarray], says: str) -> None:
    path = written(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=says) as refusal:
        load_trace(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.npz"
    path.write_text("ids")
    with pytest.raises(ValueError, match=r"is not an \.npz file"):
        load_trace(path)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("a pickle was run",))

    path = tmp_path / "evil.npz"
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", buffer.getvalue() + pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"must be int64, got object"):
        load_trace(path)


def test_a_header_that_asks_for_more_than_there_is_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "<i4", "fortran_order": False, "shape": (1 << 20, 1 << 20, 8)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("prefill.npy", buffer.getvalue())
        archive.writestr("header.npy", b"")
    with pytest.raises(ValueError, match=r"prefill.npy says \(1048576, 1048576, 8\), but has"):
        load_trace(path)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.npz"
    save_trace(trace(), path)
    monkeypatch.setattr("moewe.moe.wide_ep.traces.MAX_BYTES", 100)
    with pytest.raises(ValueError, match=r"holds [0-9,]+ bytes; use at most 100"):
        load_trace(path)
