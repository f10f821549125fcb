"""Which chat templates a model folder holds, and which one a user means: names, files and Jinja source.

Not the rendering (text/chat_template.py). The rules are those of transformers: `chat_template.jinja` and the files in
`additional_chat_templates/` win over `chat_template.json`, and that over tokenizer_config.json.
Units: characters; files are in bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .chat_template import MAX_SOURCE, ChatTemplate
from .one_line import one_line, shorten

DEFAULT = "default"
MOST_TEMPLATES = 64
_NAME = re.compile(r"[\w-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class NamedTemplates:
    """The templates of a model.

    Attributes:
        sources: Jinja source by name.
        problem: why the model's own templates are of no use, or None.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    def chosen(self, variables: Mapping[str, str]) -> ChatTemplate | None:
        """Return the template for chats: the one called default, or the only one; None when there is none.

        Several without a default are a problem, told at use: none of them may be guessed.
        """
        problem = self.problem
        source = self.sources.get(DEFAULT)
        if source is None and len(self.sources) == 1:
            (source,) = self.sources.values()
        if source is None and self.sources:
            problem = problem or (
                f"chat template: the model has several ({', '.join(sorted(self.sources))}) and none is called "
                f"{DEFAULT}; name one with --chat-template"
            )
        if source is None and problem is None:
            return None
        return ChatTemplate(source or "", variables=variables, problem=problem)


def find_templates(path: Path, config: Mapping[str, Any]) -> NamedTemplates:
    """Return the templates of the model folder `path` whose tokenizer_config.json holds `config`.

    A template that cannot be read is no reason not to serve completions, so it is a `problem` of the result.
    """
    try:
        files = _from_files(path)
        if files:
            return NamedTemplates(sources=files)
        legacy = path / "chat_template.json"
        if legacy.is_file():
            content = json.loads(_read(legacy))
            if named := templates_of(content.get("chat_template") if isinstance(content, dict) else content):
                return NamedTemplates(sources=named)
        return NamedTemplates(sources=templates_of(config.get("chat_template")))
    except (OSError, ValueError, RecursionError) as error:
        return NamedTemplates(problem=f"chat template cannot be read: {one_line(error)[:300]}")


def templates_of(value: Any) -> dict[str, str]:
    """Return the templates in the field `chat_template`: text, a list of {name, template}, or an object of them.

    Raises:
        ValueError: it is something else.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair):
        return dict(list(value.items())[:MOST_TEMPLATES])
    raise ValueError("the field chat_template holds neither text nor named texts")


def check_template_option(value: str) -> None:
    """Refuse a `--chat-template` that is certainly wrong, before the model is known.

    Raises:
        ValueError: the file cannot be read or the source does not compile; one line.
    """
    source = _given_source(value)
    if source is not None:
        _compiled(value, source)


def chosen_template(value: str, templates: NamedTemplates, variables: Mapping[str, str]) -> ChatTemplate:
    """Return the template that `--chat-template` means for a model with `templates`.

    Raises:
        ValueError: it is neither a file nor the name of a template, or the template does not compile; one line.
    """
    source = _given_source(value)
    if source is None:
        source = templates.sources.get(value)
    if source is None:
        named = ", ".join(sorted(templates.sources)) or "none"
        raise ValueError(
            f"chat_template={_shown(value)} is neither a file nor the name of a template of this model "
            f"(it has: {named}); give a file"
        )
    return _compiled(value, source, variables)


def _compiled(value: str, source: str, variables: Mapping[str, str] | None = None) -> ChatTemplate:
    template = ChatTemplate(source, variables=variables)
    if template.problem is not None:
        raise ValueError(f"chat_template={_shown(value)} is not allowed; {template.problem}")
    return template


def _given_source(value: str) -> str | None:
    """Return the source that `value` is or that its file holds; None for what can only be a name."""
    if "{" in value or "\n" in value:
        return value
    file = Path(value).expanduser()
    if _NAME.fullmatch(value) and not file.is_file():
        return None
    try:
        return _read(file)
    except OSError as error:
        raise ValueError(f"chat_template={_shown(value)} cannot be read: {error.strerror}; give a file") from None
    except ValueError as error:
        raise ValueError(f"chat_template={_shown(value)} cannot be read: {error}") from None


def _from_files(path: Path) -> dict[str, str]:
    found = {}
    if (path / "chat_template.jinja").is_file():
        found[DEFAULT] = _read(path / "chat_template.jinja")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja"))[:MOST_TEMPLATES]:
        found[file.stem] = _read(file)
    return found


def _read(file: Path) -> str:
    """Return the text of a template file, which has a limit."""
    with file.open("rb") as opened:
        data = opened.read(4 * MAX_SOURCE + 1)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not UTF-8 text (byte {error.start})") from None
    if len(text) > MAX_SOURCE:
        raise ValueError(f"{file.name} holds more than {MAX_SOURCE} characters")
    return text


def _shown(value: str) -> str:
    return repr(shorten(value, 200))
