"""The house rules that a test can check: which package may import which, how long a file may be, what is installed.

`LEVELS` is the architecture diagram: a package imports only from packages of a lower level (and from its own children).
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEVELS = {
    "moewe": 8,
    "server": 7,
    "runtime": 6,
    "models": 5,
    "moe": 4,
    "moe.wide_ep": 3,
    "attention": 3,
    "moe.routing": 2,
    "kvcache": 2,
    "quant": 1,
    "topologies": 1,
    "text": 1,
    "native": 0,
    "telemetry": 0,
}
# Folders inside a package that are part of it (no level of their own).
INNER = {
    "moe.kernels": "moe",
    "moe.wide_ep.placement": "moe.wide_ep",
    "moe.wide_ep.exchanges": "moe.wide_ep",
    "moe.wide_ep.balancing": "moe.wide_ep",
    "models.demo": "models",
    "models.published": "models",
    "models.kernels": "models",
    "attention.kernels": "attention",
    "topologies.advisor": "topologies",
    "topologies.planner": "topologies",
    "server.protocol": "server",
    "server.answers": "server",
    "server.intake": "server",
    "server.openapi": "server",
    "server.http": "server",
    "server.terminal": "server",
    "server.flags": "server",
    "server.commands": "server",
    "server.cli": "server",
    "server.client": "server",
    "server.bench": "server",
    "server.top": "server",
    "server.eval": "server",
    "server.trace": "server",
    "server.plan": "server",
    "server.advise": "server",
    "text.parsers": "text",
    "native.gpu": "native",
    "runtime.scheduling": "runtime",
    "runtime.ranks": "runtime",
    "runtime.ranks.kernels": "runtime",
    "runtime.processes": "runtime",
    "runtime.metrics": "runtime",
    "runtime.rebalancing": "runtime",
    "runtime.graphs": "runtime",
}

# What each folder inside the runtime may import of the rest of it. `scheduling` decides and `ranks` execute; neither
# knows how they are joined (`processes`) or watched (`metrics`); `rebalancing` moves experts, a file for each side;
# `graphs` replays decode steps, whoever runs them.
RUNTIME_EDGES = {
    "scheduling": {"plan", "params"},
    "ranks": {"plan", "config", "resolve", "kv_layout"},
    "processes": {"plan", "messages", "config", "worker_main", "kernels"},
    "metrics": {"plan", "messages", "rank_stats"},
    "rebalancing": {"plan", "messages", "rank_stats", "metrics"},
    "graphs": {"plan", "config", "ranks"},
}

# The same inside the server, from the lowest up: a folder imports only from rows above its own, and the files beside
# the folders (errors, options, hub, state ...) from no folder. A body comes in by `protocol` and `intake` and goes out
# by `answers`; `http` joins them; commands and tools do not know `cli`, which calls them.
SERVER_EDGES: dict[str, set[str]] = {
    "protocol": {"errors"},
    "answers": {"hub"},
    "intake": {"protocol", "answers", "errors", "state", "asker", "grammar_queue"},
    "terminal": {"options", "state"},
    "flags": set(),
    "client": set(),
    "trace": {"client", "terminal"},
    "openapi": {"protocol", "intake", "trace", "options", "state"},
    "top": {"client", "terminal"},
    "http": {
        "protocol", "answers", "intake", "openapi", "terminal", "trace", "errors", "options", "hub", "state", "asker",
        "descriptors",
    },
    "commands": {"http", "protocol", "terminal", "flags", "options", "state"},
    "bench": {"commands", "client", "terminal", "flags", "descriptors"},
    "eval": {"commands", "terminal", "flags"},
    "plan": {"bench", "terminal"},
    "advise": {"client", "terminal"},
    "cli": {"commands", "bench", "eval", "top", "trace", "plan", "advise", "terminal", "flags"},
}  # fmt: skip
EDGES = {"runtime": RUNTIME_EDGES, "server": SERVER_EDGES}

# Folders and files that must not import torch: they decide, or they run where no device is.
NO_TORCH = [
    "text/",
    "telemetry/",
    "native/",
    "topologies/",
    "moe/wide_ep/placement/",
    "moe/wide_ep/balancing/",
    "moe/wide_ep/synthetic.py",
    "moe/wide_ep/traces.py",
    "kvcache/block_pool.py",
    "kvcache/groups.py",
    "runtime/",
    "server/",
    "moewe/",
]
MAY_IMPORT_TORCH = {
    "moe/wide_ep/placement/record.py",
    "topologies/groups.py",
    "runtime/gpus.py",
    "runtime/worker.py",
    "runtime/rank_parts.py",
    "runtime/graphs/capture.py",
    "runtime/graphs/decode_step.py",
    "runtime/graphs/device.py",
    "runtime/graphs/forward.py",
    "runtime/graphs/starting.py",
    "runtime/ranks/choice.py",
    "runtime/ranks/host_memory.py",
    "runtime/ranks/kernels/launches.py",
    "runtime/ranks/kernels/rows.py",
    "runtime/ranks/loading.py",
    "runtime/ranks/logit_edits.py",
    "runtime/ranks/logprobs.py",
    "runtime/ranks/masks.py",
    "runtime/ranks/memory.py",
    "runtime/ranks/own_gpu.py",
    "runtime/ranks/native_draw.py",
    "runtime/ranks/reports.py",
    "runtime/ranks/row_scan.py",
    "runtime/ranks/sampler.py",
    "runtime/ranks/step_inputs.py",
    "runtime/rebalancing/rank_moves.py",
}
MAX_LINES = 400


@cache
def tree_of(path: Path) -> ast.Module:
    """Return what a file says; several rules look at it."""
    return ast.parse(path.read_text())


def package_files() -> list[Path]:
    tops = {name.split(".")[0] for name in LEVELS}
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def package_of(path: Path) -> str:
    """Return the package of LEVELS that holds `path`: the longest dotted prefix that has a level."""
    package = target_package(".".join(path.relative_to(ROOT).parts[:-1]))
    assert package is not None, f"{path} is in no package of LEVELS"
    return package


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted module below moewe) of every relative import, wherever in the file it stands."""
    folder = list(path.relative_to(ROOT).parts[:-1])
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - (node.level - 1)]
            if node.level - 1 > len(folder):
                raise AssertionError(f"{path}:{node.lineno} imports from beyond the top")
            stem = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                found.append((node.lineno, ".".join([*stem, alias.name])))
    return found


def target_package(module: str) -> str | None:
    """Return the package of LEVELS that `module`, dotted below moewe, belongs to."""
    parts = module.split(".")
    if parts[0] == "moewe":
        parts = parts[1:] or ["moewe"]
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in LEVELS:
            return name
        if name in INNER:
            return INNER[name]
    return None


TOPS = sorted({name.split(".")[0] for name in LEVELS})
each_top = pytest.mark.parametrize("top", TOPS)


def files_of(top: str) -> list[Path]:
    """Return the files of a package and of those in it. A test a package, not a file: there are hundreds of files."""
    return [path for path in package_files() if path.relative_to(ROOT).parts[0] == top]


def absolute_imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, module) of every import that is not relative."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.append((node.lineno, node.module))
    return found


@each_top
def test_packages_import_only_from_lower_levels(top: str) -> None:
    wrong = []
    for path in files_of(top):
        here, name = package_of(path), path.relative_to(ROOT)
        if here == "moewe":
            continue  # the facade may import everything
        for line, module in imported_modules(path):
            there = target_package(module)
            if there is None:
                wrong.append(f"{name}:{line}: {here} imports {module}, which is in no package of a lower level")
            elif there != here and not there.startswith(f"{here}.") and LEVELS[there] >= LEVELS[here]:
                wrong.append(f"{name}:{line}: {here} (level {LEVELS[here]}) imports {there} (level {LEVELS[there]})")
    assert not wrong, "\n".join(wrong)


@each_top
def test_packages_use_relative_imports_among_themselves(top: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files_of(top)
        for line, module in absolute_imports(path)
        if module.split(".")[0] in TOPS
    ]
    assert not wrong, "absolute imports of our own packages load a second copy:\n" + "\n".join(wrong)


@each_top
def test_deciding_files_do_not_import_torch(top: str) -> None:
    wrong = []
    for path in files_of(top):
        name = str(path.relative_to(ROOT))
        if name not in MAY_IMPORT_TORCH and any(name.startswith(prefix) for prefix in NO_TORCH):
            wrong += [f"{name}:{line}" for line, module in absolute_imports(path) if module.split(".")[0] == "torch"]
    assert not wrong, "these may not import torch:\n" + "\n".join(wrong)


def test_torch_rules_name_what_exists() -> None:
    for name in (*NO_TORCH, *sorted(MAY_IMPORT_TORCH)):
        assert (ROOT / name).is_dir() if name.endswith("/") else (ROOT / name).is_file(), f"{name} matches nothing"


@pytest.mark.parametrize(("top", "folder"), [(top, folder) for top, rows in EDGES.items() for folder in rows])
def test_folders_import_only_what_their_row_allows(top: str, folder: str) -> None:
    allowed = EDGES[top][folder]
    files = sorted((ROOT / top / folder).rglob("*.py"))
    assert files
    wrong, used = [], set()
    for path in files:
        for line, module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == top and parts[1] != folder:
                used.add(parts[1])
                if parts[1] not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)
    assert allowed <= used, f"nobody needs {allowed - used}: strike it"


@pytest.mark.parametrize("top", EDGES)
def test_every_folder_has_a_row(top: str) -> None:
    assert {path.parent.name for path in (ROOT / top).glob("*/__init__.py")} == set(EDGES[top])


def test_rows_of_the_server_name_only_folders_above() -> None:
    folders = list(SERVER_EDGES)
    back = {name: SERVER_EDGES[name] & set(folders[folders.index(name) :]) for name in folders}
    assert not {name: found for name, found in back.items() if found}


def test_files_beside_the_folders_of_the_server_import_from_none() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "server").glob("*.py"))
        for line, module in imported_modules(path)
        if module.split(".")[0] == "server" and module.split(".")[1] in SERVER_EDGES
    ]
    assert not wrong, "\n".join(wrong)


@each_top
def test_files_say_what_they_are(top: str) -> None:
    silent = [str(path.relative_to(ROOT)) for path in files_of(top) if not ast.get_docstring(tree_of(path))]
    assert not silent, "a module opens with what it is, what it is not, and units:\n" + "\n".join(silent)


def test_files_are_short() -> None:
    """Tests and benchmarks too: who reads them is no more patient."""
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in [*package_files(), *others]}
    assert not {name: lines for name, lines in long.items() if lines > MAX_LINES}


def test_no_package_is_called_utils() -> None:
    bad = {"utils", "util", "common", "core", "helpers", "misc"}
    assert not [path for path in package_files() if bad & set(path.relative_to(ROOT).with_suffix("").parts)]


def test_wheel_lists_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(config["packages"])
    tops = {name.split(".")[0] for name in LEVELS}
    on_disk = {"moewe"}
    for top in tops - {"moewe"}:
        for init in (ROOT / top).rglob("__init__.py"):
            on_disk.add("moewe." + ".".join(init.parent.relative_to(ROOT).parts))
    assert listed == on_disk


def test_importing_the_facade_imports_nothing_heavy() -> None:
    code = (
        "import sys, moewe; bad = {'torch', 'transformers', 'fastapi', 'triton', 'typer'} & set(sys.modules);"
        "own = {'runtime', 'server', 'moe', 'models'} & set(sys.modules); sys.exit(f'{bad} {own}' if bad or own else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_a_server_and_an_engine_whose_ranks_are_processes_do_without_torch() -> None:
    """Importing it would take a second or two of every start, and a hundred MB for as long as each of them lives."""
    code = "import sys, moewe.runtime.engine_main, moewe.server.http.serve; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tops = "|".join({name.split(".")[0] for name in LEVELS})
    import re

    names = set(re.findall(rf"`((?:{tops})/[\w/]+\.(?:py|yaml))`", page))
    assert len(names) > 10
    missing = sorted(name for name in names if not (ROOT / name).exists())
    assert not missing
