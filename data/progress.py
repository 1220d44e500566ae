"""How far a command has come: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

from devices import log

QUIET_S = 60  # between two lines where there is no terminal


@contextlib.contextmanager
def show_progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[int | None], None]]:
    """Give a function to call with the tokens of each piece of work that is done; with None, while none is."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(), "{task.completed}/{task.total}",
               "{task.fields[speed]}", rich.progress.TimeRemainingColumn())  # fmt: skip
    began = said = time.monotonic()
    tokens, first = 0, done
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done, speed="")

        def advance(count: int | None) -> None:
            nonlocal tokens, done, said
            if count is None:
                return
            tokens, done = tokens + count, done + 1
            now = time.monotonic()
            speed = f"{tokens / max(now - began, 1e-9):,.0f} tokens/s"
            bar.update(task, completed=done, speed=speed)
            if not console.is_terminal and now - said > QUIET_S and done < total:
                left_s = (now - began) / (done - first) * (total - done)
                log(f"{what} {done} of {total}, {speed}, {left_s / 60:.0f} minutes left")
                said = now

        yield advance
