"""Show the progress of an evaluation on standard error, and its results as a table."""

import functools
import sys

from rich.console import Console
from rich.table import Table

from data.progress import show_progress
from devices import is_main_process


def say(text: str) -> None:
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


progress = functools.partial(show_progress, say=say)


def table(rows: list[tuple], *columns: str) -> None:
    """Print rows under their column names. Numbers are right-aligned."""
    drawn = Table(box=None, header_style="")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if all(isinstance(row[number], str) for row in rows) else "right")
    for row in rows:
        drawn.add_row(*(f"{x:.4f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row))
    Console(width=None if sys.stdout.isatty() else 120).print(drawn)
