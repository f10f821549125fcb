"""What ends `moewe serve` before anything is loaded, and what does not: damaged checkpoints, missing templates."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.chain import chain
from tests.support.fixtures import checkpoint, copy_checkpoint, drop_tensors
from tests.support.server_process import NAME, ServerProcess, free_port

pytestmark = pytest.mark.spawn

HI = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def serve(model: Path, *flags: str) -> tuple[int, str, str, float]:
    """Run `moewe serve` to its end; returns exit code, stdout, stderr and seconds."""
    command = [sys.executable, "-m", "moewe", "serve", str(model), "--port", str(free_port()), "--topology", "EP2DP1"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--kv-cache-memory-bytes", "16MiB", "--log-level", "warning", *flags],
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr, time.monotonic() - started


def without_shard() -> tuple[Path, tuple[str, ...]]:
    folder = copy_checkpoint(checkpoint("T-MIX", shards=4))
    (folder / "model-00003-of-00004.safetensors").unlink()
    return folder, ("model-00003-of-00004.safetensors", "download")


def without_head() -> tuple[Path, tuple[str, ...]]:
    return drop_tensors(copy_checkpoint(checkpoint("T-QW3")), "lm_head.weight"), (
        "lm_head.weight",
        "tie_word_embeddings",
    )


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(without_shard, id="P-LOAD-03"),
        pytest.param(without_head, marks=pytest.mark.slow, id="P-LOAD-02"),
    ],
)
def test_an_incomplete_checkpoint_is_refused_before_any_process(damaged: object) -> None:
    folder, named = damaged()  # type: ignore[operator]
    code, out, err, took = serve(folder, "--skip-tokenizer-init")
    assert code == 1 and out == "", out
    assert len(err.splitlines()) == 1 and err.startswith("moewe: error: ") and all(word in err for word in named), err
    assert took < 40  # importing torch on a busy machine; no rank has started and no KV was held


@pytest.mark.parametrize(
    ("template", "says"),
    [
        pytest.param(None, "no chat template", marks=pytest.mark.slow, id="P-TOK-01"),
        pytest.param("{{ messages[0].content ", "does not compile", id="P-TOK-02"),
    ],
)
def test_a_missing_or_broken_template_leaves_completions(template: str | None, says: str) -> None:
    made = chain(["a", "b"], loop=True, chat_template=template)
    with ServerProcess(made.path, "--kv-cache-memory-bytes", "16MiB", topology="EP1DP1") as server:
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=HI, timeout=30)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
        answer = server.client().completions.create(model=NAME, prompt="x", max_tokens=2, temperature=0)
        assert answer.choices[0].text == "ab"
        warned = [line for line in server.log().splitlines() if "WARNING" in line and "chat requests" in line]
        assert len(warned) == (template is not None)
        if template is None:
            assert "--chat-template" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_auto_serves_on_what_is_here_and_says_why() -> None:
    made = chain(["a", "b"], loop=True)
    with ServerProcess(made.path, "--kv-cache-memory-bytes", "16MiB", topology="auto") as server:
        assert server.get("/v1/topology").json()["topology"] == "EP1DP1[adp=1,atp=1,red=0]"
        answer = server.client().completions.create(model=NAME, prompt="x", max_tokens=2, temperature=0)
        assert answer.choices[0].text == "ab"
        reasons = [line for line in server.log().splitlines() if "--topology auto: " in line]
        assert len(reasons) == 2 and "EP1DP1, 1 rank on " in reasons[0], server.log()
    code, out, err, _ = serve(made.path, "--topology", "auto", "--gpu-memory-utilization", "0.00001")
    assert code == 1 and len(err.splitlines()) == 1 and "--topology auto: no layout of up to " in err, out + err
