"""Kernels are settled once, by who starts replicas, and the ranks' processes inherit what came of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from moewe.native import library
from moewe.runtime.config import EngineConfig
from moewe.runtime.kernels import prepare_kernels
from moewe.runtime.options import layout_config
from tests.support.native_sources import use_small_sources


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    use_small_sources(tmp_path, monkeypatch)
    return layout_config({"model": "demo"})


def test_one_line_says_that_they_are_compiled_and_one_which_they_are(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    prepare_kernels(config)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "compiling native kernels (once, ~10 s)" and len(said) == 2
    assert said[1].startswith(f"CPU kernels: native, {library.native_isa()}, compiled by ")


def test_one_line_says_why_there_are_none(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("CXX", "/nonexistent")
    prepare_kernels(config)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert os.environ["MOEWE_NATIVE_FAILED"].startswith("CXX=/nonexistent")


def test_a_gpu_needs_none(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", lambda: pytest.fail("compiled for a GPU"))
    on_gpu = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, device="cuda"))
    prepare_kernels(on_gpu)
