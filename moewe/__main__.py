"""`python -m moewe` and the `moewe` command.

Not the command line (server/cli/main.py), whose imports take long enough for a Ctrl-C. Units: exit codes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys

EXIT_INTERRUPTED = 130


def _leave(*_: object) -> None:
    """End at once: nothing runs that could be saved, and an import that is cut in two would end in a traceback."""
    os.write(2, b"\nmoewe: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def main() -> None:
    """Run the command line. Until a command has its own use for Ctrl-C, that ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from .server.cli.main import main as run

    try:
        run()
    except SystemExit as end:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)  # torch takes a second to tidy up what the kernel frees


if __name__ == "__main__":
    main()
