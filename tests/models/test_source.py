"""What a user may call a model, without ever reaching a network."""

from typing import ClassVar

import pytest

from moewe.models.config import ConfigError
from moewe.models.source import HUB_FILES, HUB_IGNORED, resolve_model

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers from a script: `hub.answer` is a path or an exception; `hub.calls` are the requests."""

    class Hub:
        answer: str | Exception = str(tmp_path)
        calls: ClassVar[list] = []

    def snapshot_download(repo_id, **options):
        Hub.calls.append((repo_id, options))
        if isinstance(Hub.answer, Exception):
            raise Hub.answer
        return Hub.answer

    Hub.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return Hub


def refusal(model, **options):
    with pytest.raises(ConfigError) as caught:
        resolve_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    return message


def test_a_tokenizer_is_fetched_without_weights(hub, tmp_path):
    assert resolve_model("owner/name", what="tokenizer") == tmp_path
    assert "*.safetensors" not in hub.calls[0][1]["allow_patterns"]
    assert refusal("a/b/c", what="tokenizer").startswith("tokenizer = ")


def test_a_folder_is_taken_as_it_is(hub, tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name").samefile(tmp_path / "owner" / "name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/owner") == tmp_path / "owner"
    assert hub.calls == []


def test_a_hub_id_is_fetched_without_what_is_not_needed(hub, tmp_path):
    assert resolve_model("owner/some-model.v2", revision="refs/pr/3") == tmp_path
    ((name, options),) = hub.calls
    assert name == "owner/some-model.v2" and options["revision"] == "refs/pr/3" and options["local_files_only"] is False
    needed = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ]
    others = ["pytorch_model.bin", "model.gguf", "run.py", "original/model.safetensors", "consolidated.safetensors"]
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects([*needed, *others], **patterns)) == needed
    assert (options["allow_patterns"], options["ignore_patterns"]) == (HUB_FILES, HUB_IGNORED)


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_mode_asks_only_the_cache(hub, monkeypatch, value):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    resolve_model("owner/name")
    assert hub.calls[0][1]["local_files_only"] is True
    hub.answer = huggingface_hub.errors.LocalEntryNotFoundError("not there")
    assert "HF_HUB_OFFLINE" in refusal("owner/name")
    assert "HF_HUB_OFFLINE" not in refusal("owner/name", offline=False)


def error(name):
    cls = getattr(huggingface_hub.errors, name)
    made = cls.__new__(cls)
    made.args = ("several\nlines of\nadvice",)
    return made


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error("RepositoryNotFoundError"), "no such model"),
        (error("GatedRepoError"), "approved users"),
        (error("RevisionNotFoundError"), "revision 'v9'"),
        (error("LocalEntryNotFoundError"), "cannot be reached"),
        (ConnectionError("reset\nby peer"), "ConnectionError"),
        (RuntimeError("x" * 5000), "RuntimeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_refuses_is_said_in_one_line(hub, answer, expected):
    hub.answer = answer
    assert expected in refusal("owner/name", revision="v9")


BAD_NAMES = [
    "",
    "../../etc/nowhere",
    "/nowhere/at/all",
    "./nowhere",
    "~/nowhere-at-all",
    "a/b/c",
    "a\0b",
    "a\nb",
    "a b/c",
]
BAD_NAMES += ["owner/", "/name", "a/../b", "http://x/y", "-flag", ".hidden/name", "möwe/name"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_are_neither_folder_nor_id_reach_no_hub(hub, name):  # P-SEC-03
    assert "model = " in refusal(name)
    assert hub.calls == []


def test_a_file_is_not_a_folder(hub, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    assert "is a file" in refusal(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("revision", ["../main", "a b", "", "/main", "x\0"], ids=ascii)
def test_revisions_must_be_names(hub, revision):
    assert "revision" in refusal("owner/name", revision=revision)
    assert hub.calls == []


def test_a_revision_of_a_folder_is_refused(hub, tmp_path):
    assert "revision" in refusal(str(tmp_path), revision="main")
    assert "revision" in refusal("demo", revision="main")


def test_the_word_demo_builds_the_demo(hub, monkeypatch, tmp_path):
    import moewe.models.demo as demo

    told = []
    monkeypatch.setattr(demo, "ensure_demo_checkpoint", lambda *, on_progress: on_progress("write", 1, 2) or tmp_path)
    assert resolve_model("demo", on_progress=lambda *args: told.append(args)) == tmp_path
    assert told == [("write", 1, 2)] and hub.calls == []
