"""What an evaluation shows: how far it is, on standard error, and a table of what it found."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from devices import is_main_process

QUIET_S = 60  # between two lines where there is no terminal


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call when one of `total` is done: a bar on a terminal, a line now and then elsewhere."""
    console, begun, done = Console(stderr=True), time.monotonic(), 0
    here = is_main_process()
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (here and console.is_terminal)) as bar:
        task, said = bar.add_task(what, total=total), begun

        def advance() -> None:
            nonlocal done, said
            done += 1
            bar.advance(task)
            if here and not console.is_terminal and (now := time.monotonic()) - said > QUIET_S:
                left_s, said = (now - begun) / done * (total - done), now
                print(f"{what}  {done} of {total}, {left_s / 60:.0f} minutes left", file=sys.stderr, flush=True)

        yield advance


def table(rows: list[tuple], *columns: str) -> None:
    """Print rows under their columns; numbers to the right."""
    drawn = Table(box=None, header_style="")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if all(isinstance(row[number], str) for row in rows) else "right")
    for row in rows:
        drawn.add_row(*(f"{x:.4f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row))
    Console(width=None if sys.stdout.isatty() else 120).print(drawn)
