"""`moewe models`: the families that run and what each was checked for, as a table or as JSON.

Not the data (models/checked.py) and not about a model at hand; nothing is loaded or looked up. No shapes.
"""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from ...models.checked import CHECKED, CHECKS, TRANSFORMERS, extent
from ...models.checked import as_json as table_as_json
from ..terminal.stdout import put


def show_models(*, as_json: bool) -> int:
    """Print the families; returns the exit code."""
    put(json.dumps(table_as_json(), indent=2) + "\n" if as_json else _drawn())
    return 0


def _drawn() -> str:
    """Return the table as text of the width of the terminal (of a pipe: wide enough for every cell)."""
    table = Table(title=f"Families, checked against transformers {TRANSFORMERS}", title_justify="left")
    for name, ratio in (("model_type", 3), ("models", 4), ("shaped by", 5), ("checked for", 5)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for name, row in CHECKED.items():
        table.add_row("\n".join((name, *row.also)), row.models, ", ".join((row.kind, *row.has)), ", ".join(row.checks))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
        for check, meant in CHECKS.items():
            console.print(f"{check}: {meant.what}", markup=False, highlight=False)
        console.print(extent(), highlight=False)
        console.print(
            "On small random checkpoints; moewe refuses every other model_type by name. --json prints all of it."
        )
    return captured.get()
