"""Chat templates of a model folder: which is found, which is meant, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from moewe.text import (
    TemplateError,
    check_template_kwargs,
    check_template_option,
    chosen_template,
    load_tokenizer,
)
from tests.support.small_tokenizers import write

HI = [{"role": "user", "content": "hi"}]
NAMED = [{"name": "default", "template": "d {{ bos_token }}"}, {"name": "rag", "template": "r {{ eos_token }}"}]
SPOKEN = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim }}{{ '' if loop.last else '|' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '>' }}{% endif %}{{ tools is none }}{{ mood | default('calm') }}"
)


def folder(path: Path, config: Any = None, **files: str) -> Path:
    write(path, "byte_level", **({} if config is None else {"chat_template": config}))
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return path


def rendered(path: Path) -> str:
    template = load_tokenizer(path).chat_template
    assert template is not None
    return template.render(HI)


@pytest.mark.parametrize("form", [NAMED, {entry["name"]: entry["template"] for entry in NAMED}])
def test_of_named_templates_default_is_taken(tmp_path: Path, form: Any) -> None:
    assert rendered(folder(tmp_path, form)) == "d <s>"


def test_files_win_over_the_config(tmp_path: Path) -> None:
    folder(tmp_path, "config", chat_template_json=json.dumps({"chat_template": "json"}))
    assert rendered(tmp_path) == "json"
    folder(tmp_path, chat_template_jinja="file", additional_chat_templates__rag_jinja="more")
    assert rendered(tmp_path) == "file"
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.templates.sources == {"default": "file", "rag": "more"}
    assert chosen_template("rag", tokenizer.templates, {}).render(HI) == "more"


def test_a_single_template_needs_no_name(tmp_path: Path) -> None:
    assert rendered(folder(tmp_path, {"rag": "only"})) == "only"


def test_several_without_a_default_are_not_guessed(tmp_path: Path) -> None:
    template = load_tokenizer(folder(tmp_path, {"rag": "r", "tool_use": "t"})).chat_template
    assert template is not None and template.problem is not None
    with pytest.raises(TemplateError, match=r"several \(rag, tool_use\).*--chat-template"):
        template.render(HI)


@pytest.mark.parametrize("config", [5, [5], {"default": 5}, [{"name": "default"}]])
def test_a_field_of_another_kind_is_told_at_use(tmp_path: Path, config: Any) -> None:
    template = load_tokenizer(folder(tmp_path, config)).chat_template
    assert template is not None
    with pytest.raises(TemplateError, match="neither text nor named texts") as caught:
        template.render(HI)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_or_too_long_is_told_at_use(tmp_path: Path) -> None:
    folder(tmp_path)
    for data, says in ((b"\xff{{", "not UTF-8"), (b"a" * (1 << 21), "more than 1048576 characters")):
        (tmp_path / "chat_template.jinja").write_bytes(data)
        template = load_tokenizer(tmp_path).chat_template
        assert template is not None and template.problem is not None and says in template.problem


@pytest.mark.parametrize("template", [SPOKEN, NAMED])
def test_prompts_are_those_of_transformers(tmp_path: Path, template: Any) -> None:
    folder(tmp_path, template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.chat_template is not None
    chat = [*HI, {"role": "assistant", "content": " yes "}, {"role": "user", "content": "ok"}]
    for options in ({}, {"mood": "dry"}, {"bos_token": "X"}):
        for opened in (True, False):
            text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened, **options)
            assert ours.chat_template.render(chat, add_generation_prompt=opened, **options) == text
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    text = ours.chat_template.render(chat)
    assert ours.encode(text, add_special_tokens=False) == ids


def test_special_tokens_of_the_model_are_variables(tmp_path: Path) -> None:
    write(
        tmp_path,
        "byte_level",
        chat_template="{{ end_of_turn_token }}",
        extra_special_tokens={"end_of_turn_token": "</s>"},
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert rendered(tmp_path) == theirs.apply_chat_template(HI, tokenize=False) == "</s>"


# --- --chat-template --------------------------------------------------------------------------------------------------
def test_an_option_is_a_file_or_source_or_a_name(tmp_path: Path) -> None:
    templates = load_tokenizer(folder(tmp_path, NAMED)).templates
    (tmp_path / "own.jinja").write_text("own {{ bos_token }}")
    for value, text in ((str(tmp_path / "own.jinja"), "own B"), ("{{ bos_token }}!", "B!"), ("rag", "r ")):
        check_template_option(value)
        assert chosen_template(value, templates, {"bos_token": "B"}).render(HI) == text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nowhere.jinja", "cannot be read: No such file"),
        ("/", "cannot be read: Is a directory"),
        ("{% for %}", "does not compile"),
        ("broken", "does not compile"),
        ("latin", "not UTF-8"),
    ],
)
def test_a_wrong_option_is_one_line_before_the_model_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_text("{{ messages[0] ")
    (tmp_path / "latin").write_bytes(b"\xe4")
    with pytest.raises(ValueError, match=says) as caught:
        check_template_option(value)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"chat_template={value!r}")


def test_a_name_that_the_model_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    check_template_option("tool_use")  # cannot be told yet
    with pytest.raises(ValueError, match=r"chat_template='tool_use'.*it has: default, rag"):
        chosen_template("tool_use", load_tokenizer(folder(tmp_path, NAMED)).templates, {})


# --- chat_template_kwargs ---------------------------------------------------------------------------------------------
def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def test_plain_json_passes() -> None:
    kwargs = {"enable_thinking": False, "style": {"a": [1, 2.5, None, "x"]}, "größe": 1}
    assert check_template_kwargs(kwargs) == kwargs


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"messages": []}, "chat_template_kwargs.messages is not allowed; use the field of the request"),
        ({"add_generation_prompt": False}, "use the field"),
        ({"chat_template": "x"}, "not a variable"),
        ({"tokenize": True}, "not a variable"),
        ({"not a name": 1}, "'not a name'"),
        ({"_x": 1}, "'_x'"),
        ({"x": "a" * 70_000}, "larger than 65536"),
        ({"x": ["a" * 1000] * 70}, "larger than 65536"),
        ({f"x{i}": 1 for i in range(65)}, "65 names"),
        ({"x": nested(9)}, "nested more than 8"),
        ({"x": object()}, "holds a object"),
        ({"x": {1: 2}}, "holds a dict"),
        ([], "must be an object"),
    ],
)  # fmt: skip
def test_other_variables_are_refused(kwargs: Any, says: str) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs") as caught:
        check_template_kwargs(kwargs)
    assert says in str(caught.value) and "\n" not in str(caught.value)
