"""The `moewe` command from outside: help, one-line mistakes, exit codes, the port held before anything loads."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moewe.models.checked import CHECKED, TRANSFORMERS
from moewe.server.cli import main as cli
from moewe.server.commands import local, serve
from moewe.server.commands.serve import bind, server_options
from moewe.server.flags.values import Settings
from moewe.server.terminal.bars import printable


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    out, err = capfd.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, out, err


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


def test_help_and_version_do_not_load_torch() -> None:
    code = """
import sys
from moewe.server.cli.main import main
for words in (["--version"], ["--help"], [], ["serve", "--help"], ["chat", "-h"], ["models"]):
    print("::", words)
    try:
        main(words)
    except SystemExit as left:
        heavy = [name for name in ("torch", "transformers", "fastapi", "numpy") if name in sys.modules]
        if heavy or left.code:
            sys.exit(f"{words}: loaded {heavy}, code {left.code}")
    else:
        sys.exit(f"{words}: did not end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    _, *pages = done.stdout.split(":: ")
    assert len(pages) == 6 and all("moewe" in page for page in pages)


def test_help_groups_flags_in_panels(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "serve", "--help")
    assert code == 0
    for panel in ("Model", "Topology and device", "Memory", "Scheduling", "HTTP server", "General"):
        assert panel in out
    assert "Sampling" not in out and "Sampling" in run(capfd, "generate", "--help")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve"], "no MODEL is given"),
        (["serve", "m", "--max-model-length", "3"], "--max-model-len"),
        (["serve", "m", "--port", "abc"], "--port: 'abc'"),
        (["serve", "m", "--port", "70000"], "--port 70000"),
        (["serve", "m", "--topology", "EP8"], "did you mean EP8DP1?"),
        (["serve", "m", "--topology", "dynamo-launch"], "not available in this version"),
        (["serve", "m", "--topology", "EP2DP1", "--dialect", "x"], "vllm, sglang, deepseek"),
        (
            ["serve", "m", "--chat-template", "{{ 1 }}", "--skip-tokenizer-init"],
            "--chat-template='{{ 1 }}' is not allowed; it needs the tokenizer",
        ),
        (["chat", "m", "--chat-template", ""], "--chat-template"),
        (["generate", "m", "text", "--chat-template", "{{ 1 }}"], "there is no flag --chat-template"),
        (["serve", "m", "--generation-config", ""], "--generation-config"),
        (["serve", "m", "-tp", "8"], "one topology says it all"),
        (["serve", "m", "--data-parallel-size=8"], "one topology says it all"),
        (["serve", "m", "--log-level", "loud"], "--log-level: 'loud'"),
        (["serve", "m", "--host", "not a host", "--port", "0"], "--host 'not a host'"),
        (["serve", "m", "--chat-template", "nowhere.jinja"], "--chat-template='nowhere.jinja' cannot be read"),
        (["serve", "m", "--shutdown-timeout", "-1"], "--shutdown-timeout=-1.0"),
        (["serve", "m", "--price-per-hour", "0"], "--price-per-hour=0.0 is not allowed; use a number above 0"),
        (["serve", "m", "--price-per-hour", "nan"], "--price-per-hour=nan is not allowed"),
        (["generate", "m", "text", "--max-tokens", "-1"], "--max-tokens=-1"),
        (["generate", "m", "text", "--max-tokenz", "1"], "there is no flag --max-tokenz; did you mean --max-tokens?"),
        (["serve", "m", "--prot", "1"], "there is no flag --prot; did you mean --port?"),
        (["plan", "m", "--ranks", "4"], "there is no flag --ranks; see moewe plan --help"),
        (["serve", "m", "--chat-template", "{% for %}"], "is not allowed; chat template does not compile"),
        (["chat", "m", "--chat-template", "/"], "--chat-template='/' cannot be read: Is a directory"),
        (["serve", "m", "--seed", "99999999999999999999999"], "--seed=99999999999999999999999 is not allowed"),
        (["serve", "m", "--max-num-seqs", "0"], "--max-num-seqs=0"),
        (["serve", "m", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens=0"),
        (["serve", "m", "--max-num-batched-tokens", "8"], "use at least max_num_seqs (64)"),
        (["serve", "m", "--max-queued-requests", "-1"], "--max-queued-requests=-1"),
        (["serve", "m", "--stall-timeout", "-1"], "--stall-timeout=-1"),
        (["serve", "m", "--stall-timeout", "inf"], "--stall-timeout=inf"),
        (["serve", "m", "--schedule-policy", "lifo"], "--schedule-policy='lifo' is not allowed; use fcfs or priority"),
        (["serve", "m", "--load-format", "pt"], "--load-format='pt'"),
        (["serve", "m", "--dtype", "foo"], "--dtype='foo' is not allowed; use auto"),
        (["serve", "m", "-q", "fp8"], "-q asks for quantized weights, and this version has none of it"),
        (["serve", "m", "--enable-prefix-caching"], "asks for a prefix cache"),
        (["chat", "m", "--speculative-config={}"], "asks for speculative decoding"),
        (["serve", "m", "--all2all-backend", "x"], "or use exchange: shm, all_to_all"),
        (["serve", "m", "--enable-dbo"], "overlap says it: auto"),
        (["serve", "m", "--overlap", "sometimes"], "--overlap='sometimes' is not allowed; use auto, on, off"),
        (["serve", "m", "--cuda-graph-sizes", "1", "2"], "--cuda-graph-sizes=[1, 2] is not allowed; a CPU has no CUDA"),
        (["serve", "m", "--enable-piecewise-cuda-graph"], "decode steps run as CUDA graphs, prefill does not"),
        (["banana"], "banana"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_one(
    capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    code, out, err = run(capfd, *words)
    assert code == 1
    assert says in err and err.startswith("moewe: error: ") and len(err.splitlines()) == 1
    assert "Traceback" not in out + err


def test_a_port_in_use_is_known_before_anything_loads(listener: socket.socket) -> None:  # P-OPS-06
    port = listener.getsockname()[1]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "moewe", "serve", "demo", "--port", str(port)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr and len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 30  # seconds on a busy machine; nothing that takes minutes has begun


def test_nothing_heavy_is_imported_before_the_port_is_held(listener: socket.socket) -> None:  # P-OPS-06
    code = f"""
import sys
from moewe.server.cli.main import main
try:
    main(["serve", "demo", "--port", "{listener.getsockname()[1]}"])
except SystemExit as left:
    heavy = [name for name in ("torch", "transformers", "fastapi", "uvicorn") if name in sys.modules]
    sys.exit(f"loaded {{heavy}}" if heavy else left.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "is in use" in done.stderr and "loaded" not in done.stderr


def test_the_port_is_held_from_binding_on() -> None:
    with bind("127.0.0.1", 0) as held:
        with pytest.raises(ValueError, match="in use"):
            bind("127.0.0.1", held.getsockname()[1])


def test_serve_holds_the_port_while_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from moewe.runtime import session

    seen: list[str] = []

    def locate(config: object) -> None:
        with pytest.raises(ValueError, match="in use"):
            bind("127.0.0.1", port)
        seen.append("held")
        raise ValueError("no such model")

    monkeypatch.setattr(session, "locate", locate)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _, err = run(capfd, "serve", "m", "--port", str(port))
    assert (code, seen) == (1, ["held"]) and "no such model" in err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"architectures": null, "model_type": "foo"}', "mixtral, qwen2_moe, qwen3_moe"),
        ('{"architectures": ["FooForCausalLM"]}', "mixtral, qwen2_moe, qwen3_moe"),
        ("{", "config.json"),
    ],
)
def test_an_unknown_model_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], config: str, says: str
) -> None:  # P-LOAD-26
    (tmp_path / "config.json").write_text(config)
    code, _, err = run(capfd, "serve", str(tmp_path), "--port", "0")
    assert code == 1 and len(err.splitlines()) == 1 and "Traceback" not in err
    assert says in err, err


def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "serve", "m", "--topology", "EP8", "--log-level", "debug")
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("moewe: error: ")


def test_options_reach_their_owners(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(serve, "serve", lambda settings: seen.append(settings) or 0)
    words = ["serve", "m", "--topology", "EP8DP8", "--dialect", "vllm", "--context-length", "100", "--port", "1",
             "--served-model-name", "a", "--served-model-name", "b", "--numa-bind",
             "--mem-fraction-static=0.5"]  # fmt: skip
    assert run(capfd, *words)[0] == 0
    (settings,) = seen
    config = serve.config_of(settings)
    assert config.parallel.topology == "EP8DP1[adp=8,atp=1,red=0]"
    assert config.model.max_model_len == 100 and config.parallel.numa_bind
    assert config.cache.gpu_memory_utilization == 0.5
    assert server_options(settings.http).served_model_name == ("a", "b")


def test_exit_codes_of_commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> None:
        def chat(settings: Settings) -> int:
            raise error

        monkeypatch.setattr(local, "chat", chat)

    class LostError(RuntimeError):
        exit_code = 3

    for error, expected, says in [
        (ValueError("field=1 is wrong;\nuse 2"), 1, "moewe: error: field=1 is wrong; use 2"),
        (LostError("rank 1 was killed"), 3, "rank 1 was killed"),
        (KeyError("x"), 1, "an error in moewe"),
        (KeyboardInterrupt(), 130, ""),
    ]:
        raising(error)
        code, _, err = run(capfd, "chat", "m")
        assert code == expected and says in err and "Traceback" not in err
    monkeypatch.setattr(local, "chat", lambda settings: 3)
    assert run(capfd, "chat", "m")[0] == 3


def test_a_full_stdout_is_named() -> None:
    code = "from moewe.server.terminal.stdout import put; put('y')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "stdout cannot be written: No space left on device" in done.stderr


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\rc\n\td\x07é") == "a[31mbc\n\tdé"


def test_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"moewe \d+\.\d+\.\d+\n", run(capfd, "--version")[1])


def test_demo_checkpoint_goes_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from moewe.models import demo

    monkeypatch.setattr(demo, "ensure_demo_checkpoint", lambda directory: directory.resolve())
    assert run(capfd, "demo-checkpoint", str(tmp_path))[:2] == (0, f"{tmp_path.resolve()}\n")
    code, _, err = run(capfd, "demo-checkpoint")
    assert code == 1 and "DIR" in err


def test_models_are_listed_as_a_table_or_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "models")
    assert code == 0 and TRANSFORMERS in out
    shown = json.loads(run(capfd, "models", "--json")[1])
    assert [family["model_type"] for family in shown["families"]] == list(CHECKED)
    assert shown["transformers"] == TRANSFORMERS
    for family in shown["families"]:
        assert set(family["checks"]) <= set(shown["checks"])
        for word in (family["model_type"], *family["also"], family["fixtures"][0]):
            assert word in out or word in family["fixtures"]
    assert "T-DS3" in str(shown) and "kimi_k2" in out
