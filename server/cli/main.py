"""The `moewe` command: flags to options, one line for each mistake, and an exit code.

Not what the commands do (server/commands/serve.py, server/commands/local.py), which is imported when one runs: help
stays fast. Exit codes: 0 fine, 1 a mistake or a failed start, 3 a rank or the engine was lost, 130 interrupted.
"""

from __future__ import annotations

import inspect
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..flags.table import ALIASES, ENGINE, HTTP, SAMPLE, SHARED, Flag, flags_of, with_flag, without_aliases
from ..terminal.stdout import give_up_stdout, put
from .tools import BENCH_HELP, TOOLS, Tool, join_words

EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 130
_METAVARS = {"int": "N", "ints": "N,N", "float": "X", "bytes": "SIZE", "text": "TEXT", "list": "TEXT"}

app = typer.Typer(
    name="moewe",
    help="Serve Mixture-of-Experts language models with expert parallelism.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"moewe {version('moewe')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def _parameter(flag: Flag) -> inspect.Parameter:
    """Return the parameter that makes typer read `flag`; every default is None, so that what was given stands out."""
    kinds: dict[str, Any] = {"bool": bool | None, "switch": bool | None, "list": list[str] | None}
    name = f"--{flag.name}"
    if flag.kind == "bool":
        name += f"/--no-{flag.name}"
    option = typer.Option(
        *filter(None, (flag.short, name)),
        help=flag.help_text,
        rich_help_panel=flag.panel,
        show_default=False,
        metavar=_METAVARS.get(flag.kind, ""),
        hidden=flag.hidden,
    )
    return _keyword(flag.parameter, Annotated[kinds.get(flag.kind, str | None), option])


def _argument(name: str, help: str) -> inspect.Parameter:
    argument = typer.Argument(help=help, metavar=name.upper(), show_default=False)
    return _keyword(f"{name}_argument", Annotated[str | None, argument])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _further(tool: Tool) -> inspect.Parameter:
    """Return the argument for words that belong to a flag; shown only where they need no flag before them."""
    alone = tool.words_alone
    metavar = tool.words.upper() if alone else ""
    shown = typer.Argument(hidden=not alone, metavar=metavar, help=f"As --{tool.words}.", show_default=False)
    return _keyword("words_argument", Annotated[list[str] | None, shown])


def _add_command(
    name: str,
    help: str,
    arguments: Sequence[inspect.Parameter],
    groups: Sequence[str],
    run: Callable[[Any], int],
    without: Sequence[str] = (),
) -> None:
    """Add a command whose flags come from the table, but for those `without`; `run` gets its `Settings`."""
    flags = tuple(flag for flag in flags_of(*groups) if flag.name not in without)
    _add(app, name, help, [*arguments, *map(_parameter, flags)], flags, run)


def _add(
    to: typer.Typer,
    name: str,
    help: str,
    parameters: Sequence[inspect.Parameter],
    flags: Sequence[Flag],
    run: Callable[[Any], int],
    tool: Tool | None = None,
) -> None:
    """Add a command to `to`; `run` gets the `Settings` of its flags, `tool` says where further words go."""

    def command(**given: Any) -> int:
        from ..flags.values import read_settings

        settings = read_settings(flags, join_words(given, tool) if tool is not None else given)
        _set_up_logging(settings.shared.get("log-level"), settings.shared.get("log-format"), quiet=run is not _serve)
        if run is not _serve:  # a server has handlers of its own; what runs here ends by KeyboardInterrupt
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(settings)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    to.command(name, help=help)(command)


def _serve(settings: Any) -> int:
    from ..commands.serve import serve

    return serve(settings)


def _generate(settings: Any) -> int:
    from ..commands.local import generate

    return generate(settings)


def _chat(settings: Any) -> int:
    from ..commands.local import chat

    return chat(settings)


_MODEL = _argument("model", "Folder, hub id, or the word demo.")
_add_command(
    "serve",
    "Serve MODEL over HTTP as OpenAI's API does.",
    [_MODEL],
    [ENGINE, HTTP, SHARED],
    _serve,
)
_add_command(
    "generate",
    "Continue PROMPT once and stream the text to stdout (PROMPT - or none reads stdin).",
    [_MODEL, _argument("prompt", "Text to continue.")],
    [ENGINE, SAMPLE, SHARED],
    _generate,
    without=["chat-template"],  # it continues a text as it stands
)
_add_command(
    "chat",
    "Talk to MODEL in the terminal; Ctrl-C stops an answer, Ctrl-D leaves.",
    [_MODEL],
    [ENGINE, SAMPLE, SHARED],
    _chat,
)
_groups = {"": app, "bench": typer.Typer(help=BENCH_HELP, no_args_is_help=True)}
app.add_typer(_groups["bench"], name="bench")
for _tool in TOOLS:
    _model = _argument("model", _tool.model_help) if _tool.model_help else _MODEL
    _words = [_model] if _tool.takes_model else [_further(_tool)] if _tool.words else []
    _parameters = [*_words, *map(_parameter, _tool.flags)]
    _add(_groups[_tool.parent], _tool.name, _tool.help, _parameters, _tool.flags, _tool.run, _tool)


@app.command("models")
def _models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """List the families that run, what shapes each, and what each was checked for."""
    from ..commands.models import show_models

    return show_models(as_json=as_json)


@app.command("doctor")
def _doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> int:
    """Say what this machine has, which kernels it uses, how fast it can be, and what to mend."""
    _set_up_logging(None, None, quiet=True)
    from ..commands.doctor import doctor

    return doctor(as_json=as_json)


@app.command("demo-checkpoint")
def _demo_checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; made if it does not exist.")],
) -> int:
    """Write the demo checkpoint (135 M parameters, 270 MB, real English) into DIR."""
    from ...models.demo import ensure_demo_checkpoint

    print(ensure_demo_checkpoint(directory))
    return 0


@app.command("monitoring")
def _monitoring(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; made if it does not exist.")],
) -> int:
    """Write a Grafana dashboard and Prometheus alert rules for /metrics into DIR."""
    from ...runtime.metrics.monitoring import write_monitoring

    for path in write_monitoring(directory):
        print(path)
    return 0


def _set_up_logging(level: str | None, form: str | None, *, quiet: bool) -> None:
    from ...telemetry.logs import FORMATS, LEVELS, hand_down, set_up_logs

    for flag, value, known in (("--log-level", level, LEVELS), ("--log-format", form, FORMATS)):
        if value is not None and value not in known:
            raise ValueError(f"{flag}: {value!r} is not allowed; use one of {', '.join(known)}")
    hand_down(level, form or "text")
    set_up_logs("moewe", level=level or ("warning" if quiet else "info"), form=form or "text")
    if quiet and level is None:  # compiling takes seconds: who waits for it shall know
        logging.getLogger("moewe.native").setLevel(logging.INFO)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code; mistakes are one line on stderr."""
    words = without_aliases(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=words or ["--help"], standalone_mode=False, prog_name="moewe")
        put()
    except BrokenPipeError:
        give_up_stdout()  # whoever read it is gone
        code = EXIT_MISTAKE
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception as error:
        code = _report(error, words)
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception, words: Sequence[str]) -> int:
    """Say what went wrong in one line and return the exit code."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        import traceback

        traceback.print_exception(error)
    code = EXIT_MISTAKE
    if hasattr(error, "format_message"):  # typer's own errors: a flag that does not exist, and the like
        message = _usage_message(error, words)
    elif hasattr(error, "exit_code"):
        code, message = error.exit_code, str(error)
    elif isinstance(error, (ValueError, OSError)):
        message = with_flag(str(error))
    else:
        message = f"{type(error).__name__}: {error} (an error in moewe; --log-level debug shows where)"
    from ...telemetry.logs import json_is_wanted

    line = " ".join(message.split())
    if json_is_wanted():
        logging.getLogger("moewe").error("%s", line)  # who collects JSON reads nothing else
    else:
        print(f"moewe: error: {line}", file=sys.stderr)
    return int(code)


def _usage_message(error: Any, words: Sequence[str]) -> str:
    from ...runtime.foreign import foreign
    from ...runtime.options import nearest

    name = str(getattr(error, "option_name", "") or "")
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag.startswith(name) and (message := foreign(flag)) is not None:
            return message
    if name.startswith("--") and hasattr(error, "possibilities"):
        context = getattr(error, "ctx", None)
        shown = () if context is None else (each for each in context.command.params if not getattr(each, "hidden", 0))
        known = [word for each in shown for word in each.opts if word.startswith("--")]
        known += [alias for alias, flag in ALIASES.items() if flag in known]
        path = "moewe" if context is None else context.command_path
        return f"there is no flag {name}; {nearest(name, known, otherwise=f'see {path} --help')}"
    return f"{error.format_message()} (see moewe --help)"
