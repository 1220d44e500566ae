"""Show the progress of an evaluation on standard error, and its results as a table."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from devices import is_main_process

QUIET_S = 60  # seconds between progress lines without a terminal


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` items. Shows a bar on a terminal, or a line every QUIET_S."""
    console, begun, done = Console(stderr=True), time.monotonic(), 0
    here = is_main_process()
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (here and console.is_terminal)) as bar:
        task, printed = bar.add_task(what, total=total), begun

        def advance() -> None:
            nonlocal done, printed
            done += 1
            bar.advance(task)
            if here and not console.is_terminal and (now := time.monotonic()) - printed > QUIET_S:
                left_s, printed = (now - begun) / done * (total - done), now
                print(f"{what}  {done} of {total}, {left_s / 60:.0f} minutes left", file=sys.stderr, flush=True)

        yield advance


def table(rows: list[tuple], *columns: str) -> None:
    """Print rows under their column names. Numbers are right-aligned."""
    drawn = Table(box=None, header_style="")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if all(isinstance(row[number], str) for row in rows) else "right")
    for row in rows:
        drawn.add_row(*(f"{x:.4f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row))
    Console(width=None if sys.stdout.isatty() else 120).print(drawn)
