"""The Jinja environment for templates that nobody vouches for: no way out, no endless loop, no exploding text.

Not the rendering (text/chat_template.py). On top of Jinja's immutable sandbox every loop round, macro, filter, call and
captured block is metered, and whatever can multiply the size of a value is bounded before it runs.
Units: CPU seconds of the calling thread; characters.
"""

from __future__ import annotations

import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterator, Set, ValuesView
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .one_line import one_line

MAX_CPU_SECONDS = 2.0
MAX_CHARACTERS = 16 * 1024 * 1024
MAX_MADE = 16 * MAX_CHARACTERS
# No honest template repeats, pads or counts further than this.
MAX_NUMBER = 1_000_000
# Products of whole numbers may have this many bits: repeated squaring would outgrow any machine within a few lines.
MAX_BITS = 4096
# What an item of a list counts as, in characters.
_ITEM = 16
_HUGE_WIDTH = re.compile(r"\d{7,}")
_COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*")
# They turn whatever they get into text: a list may name the same long text a million times.
_TEXT_FILTERS = ("capitalize", "e", "escape", "forceescape", "format", "indent", "lower", "string", "striptags",
                 "title", "trim", "truncate", "upper", "urlencode", "wordcount")  # fmt: skip
# Each can blow up a small input within a single call, and no chat template needs them.
_REMOVED_FILTERS = ("batch", "center", "slice", "wordwrap", "xmlattr", "urlize", "pprint", "random")


class TemplateError(ValueError):
    """The template does not compile, refuses the conversation or breaks a limit; one line."""


_limits = threading.local()


@contextmanager
def metered() -> Iterator[None]:
    """Give what renders inside, in this thread, MAX_CPU_SECONDS."""
    _limits.deadline = time.thread_time() + MAX_CPU_SECONDS
    _limits.made = 0
    try:
        yield
    finally:
        _limits.deadline = 0.0


class _Metered(NodeTransformer):
    """Adds a tick to each loop and macro, and bounds what `~` and captured blocks build.

    It does so through filters: unlike a variable, a template can neither see nor replace them.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "_concat", node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filter(node.filter, "_bounded", node.lineno)
        return node

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(None), "_tick", node.lineno)).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]


def _filter(value: nodes.Expr | None, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None).set_lineno(line)  # type: ignore[return-value]


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  jinja2 wants a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the limits of this module and the helpers that chat templates expect."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_printable)
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = _timed(function)
        for name in _TEXT_FILTERS:
            self.filters[name] = _guarded(self.filters[name])
        self.filters["sum"] = _sum
        self.filters["replace"] = _replace
        self.filters["join"] = _join
        self.filters |= {"_bounded": _bounded, "_concat": _join, "_tick": _tick}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also hide methods that build without bounds."""
        if isinstance(obj, str) and attr in ("translate", "expandtabs", "encode"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Also check the widths in the pattern of `str.format`."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and value.__name__ in ("format", "format_map"):
            _check_braces(owner)
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_value([args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check operands that could make a huge value, then compute."""
        if operator == "%" and isinstance(left, str):
            check_format(left)
            check_value(right)
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            check_size(len(left) + len(right))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateError(f"chat template multiplies to numbers of more than {MAX_BITS} bits")
            for value, factor in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(factor, int):
                    check_number(len(value) * factor)
        elif operator == "**" and not (_is_small(left) and _is_small(right)):
            raise TemplateError("chat template raises to a power with numbers beyond 64")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Check arguments and result of a call that the template makes."""
        _tick(None)
        owner, method = getattr(function, "__self__", None), getattr(function, "__name__", "")
        # Methods of texts and numbers pad and repeat; to macros and mappings a number is only a value.
        if isinstance(owner, (str, int)) and method not in ("format", "format_map"):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    check_number(value)
        if isinstance(owner, str):
            if method == "join" and args:
                return _join(list(args[0]), owner)
            elif method == "replace" and len(args) >= 2:
                return _replace(owner, args[0], args[1], *args[2:])
        return _bounded(super().call(context, function, *args, **kwargs))


def check_number(value: int) -> None:
    """Refuse a count or width that no honest template needs."""
    if abs(value) > MAX_NUMBER:
        raise TemplateError(f"chat template asks for more than {MAX_NUMBER} repetitions or characters")


def check_size(characters: int) -> None:
    """Refuse a value of more than MAX_CHARACTERS."""
    if characters > MAX_CHARACTERS:
        raise TemplateError(f"chat template builds a value of more than {MAX_CHARACTERS} characters")


def check_value(value: Any) -> None:
    """Refuse a value whose text would have more than MAX_CHARACTERS, without writing it out.

    A list can hold one long text, or one long list, many times over: it is small in memory and endless in print.
    """
    if isinstance(value, str):
        check_size(len(value))
        return
    total, rounds, todo = 0, 0, [value]
    while todo:
        rounds += 1
        if rounds % 4096 == 0:
            _tick(None)  # what holds itself has no end
        item = todo.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Namespace):
            todo.append(item._Namespace__attrs)
        elif isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
            total += len(item)
        elif isinstance(item, (list, tuple, Set, ValuesView)):
            todo += item
            total += len(item)
        check_size(total)


def check_format(pattern: str) -> None:
    """Refuse a format string with an absurd width, or with one that its values hold."""
    if _HUGE_WIDTH.search(pattern):
        raise TemplateError("chat template formats with a width of more than six digits")
    if _COMPUTED_WIDTH.search(pattern.replace("%%", "")):
        raise TemplateError("chat template formats with a width that it computes")


def _check_braces(pattern: str) -> None:
    """Refuse a pattern of `str.format` as `check_format` does; its computed widths stand in braces within braces."""
    if _HUGE_WIDTH.search(pattern):
        raise TemplateError("chat template formats with a width of more than six digits")
    if any("{" in (spec or "") for _, _, spec, _ in string.Formatter().parse(pattern)):
        raise TemplateError("chat template formats with a width that it computes")


def _is_small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 64


def _tick(_: None) -> None:
    if time.thread_time() > getattr(_limits, "deadline", 0.0):
        raise TemplateError(f"chat template ran for more than {MAX_CPU_SECONDS:g} s; it may loop for ever")


def _bounded(value: Any) -> Any:
    """Check one text or list, and what all those made in this rendering have together: each could be kept."""
    if isinstance(value, (str, list, tuple)):
        check_size(len(value))
        _limits.made = getattr(_limits, "made", 0) + len(value) * (1 if isinstance(value, str) else _ITEM)
        if _limits.made > MAX_MADE:
            raise TemplateError(f"chat template makes texts and lists of more than {MAX_MADE} characters in all")
    return value


def _printable(value: Any) -> Any:
    """Check what `{{ ... }}` prints."""
    check_value(value)
    return value


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the time before a filter and the size of what it made: a template need not loop to work for long.

    Nothing has a deadline while a template is compiled, so filters of constants are not run then.
    """

    @wraps(function)
    def meter(*args: Any, **kwargs: Any) -> Any:
        _tick(None)
        return _bounded(function(*args, **kwargs))

    return meter


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        formats = function.__name__ == "do_format"
        for position, argument in enumerate((*args, *kwargs.values())):
            if not isinstance(argument, int):
                check_value(argument)
            elif position and not formats:  # the first is what is shown, as all are that a pattern names
                check_number(argument)
        if formats:
            check_format(str(args[0]))
        return _bounded(function(*args, **kwargs))

    return guard


def _sum(values: Any, attribute: str | None = None, start: float = 0) -> float:
    """Add numbers; lists would grow with the square of their number."""
    numbers = [value if attribute is None else value[attribute] for value in values]
    if not all(isinstance(number, (int, float)) for number in [*numbers, start]):
        raise TemplateError("chat template sums what are no numbers")
    return sum(numbers, start)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    check_value(value)
    text = str(value)
    check_size(len(text) + text.count(old) * len(new))
    return str(_bounded(text.replace(old, new, -1 if count is None else count)))


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    values = [value if attribute is None else value[attribute] for value in values]
    check_value(values)
    texts = [str(value) for value in values]
    check_size(sum(map(len, texts)) + len(separator) * len(texts))
    return str(_bounded(separator.join(texts)))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    check_number(indent or 0)
    check_value(value)
    return str(_bounded(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)))


def _raise(message: str) -> None:
    raise TemplateError(one_line(message))
