"""Text to stdout, and one clear error when it cannot be written (a full disk, a closed device).

Not what is printed (server/commands/local.py, server/commands/serve.py) and no bars (server/terminal/bars.py). A reader
that has gone stays a BrokenPipeError, which is no mistake of anybody. Units: characters.
"""

from __future__ import annotations

import os
import sys


class StdoutError(RuntimeError):
    """stdout takes nothing more."""

    exit_code = 1


def put(text: str = "") -> None:
    """Write `text` and whatever was printed before to stdout, now.

    Raises:
        StdoutError: one line that says why it cannot be written.
        BrokenPipeError: nobody reads it any more.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up_stdout()
        raise StdoutError(f"stdout cannot be written: {error.strerror}") from error


def give_up_stdout() -> None:
    """Let stdout lead nowhere: Python would complain again when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
