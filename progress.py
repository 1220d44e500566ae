"""Show the progress of a command: a bar on a terminal, otherwise a line once a minute."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from utils import duration, is_main_process, log

QUIET_S = 60  # between two lines when there is no terminal


def print_to_stderr(sentence: str) -> None:
    if is_main_process():
        print(sentence, file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_progress(what: str, total: int, done: int = 0, say: Callable[[str], None] = log) -> Iterator[Callable]:
    """Yield advance(n). Call it after each item, with the item's number of tokens if it has tokens; advance(None) does
    nothing.

    say   prints a line, on process 0
    """
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(), "{task.completed}/{task.total}{task.fields[speed]}",
               rich.progress.TimeRemainingColumn())  # fmt: skip
    began = reported = time.monotonic()
    tokens, first, hidden = 0, done, not (console.is_terminal and is_main_process())
    with rich.progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total, completed=done, speed="")

        def advance(count: int | None = 0) -> None:
            nonlocal tokens, done, reported
            if count is None:
                return
            tokens, done = tokens + count, done + 1
            now = time.monotonic()
            speed = f", {tokens / max(now - began, 1e-9):,.0f} tokens/s" if tokens else ""
            bar.update(task, completed=done, speed=speed)
            if not console.is_terminal and now - reported > QUIET_S and done < total:
                left_s = (now - began) / (done - first) * (total - done)
                say(f"{what} {done} of {total}{speed}, about {duration(left_s)} left")
                reported = now

        yield advance


def track(items: list, what: str) -> Iterator:
    """Yield the items, and show on standard error how many have been processed."""
    with show_progress(what, len(items), say=print_to_stderr) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def show_busy(what: str, say: Callable[[str], None] = log) -> Iterator[None]:
    """Show what this process does inside the context: with the time so far on a terminal, elsewhere as one line."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    if not (console.is_terminal and is_main_process()):
        say(f"{what} ...")
        yield
        return
    columns = rich.progress.SpinnerColumn(), rich.progress.TimeElapsedColumn(), "{task.description}"
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(what, total=None)
        yield
