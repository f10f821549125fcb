"""`python -m moewe` and the `moewe` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from .server.cli import main as run

    run()


if __name__ == "__main__":
    main()
