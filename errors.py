"""Errors a user can cause, with the nearest thing that works, and how a command ends in one line."""

import contextlib
import difflib
import functools
import os
import signal
import sys

log_error = None  # `devices.open_log` sets it: the line that ends a command is in the log file too


class UserError(ValueError):
    """What a user asked for cannot be done. Commands print the message, without a traceback, and exit with `status`."""

    status = 2


class DiskLost(UserError):
    """The disk that a command writes to went away. It may come back, so launcher.sh restarts the command."""

    status = 75  # sysexits.h calls it EX_TEMPFAIL


def require_multiple(name: str, size: int, parts: int, over: str) -> None:
    """Raises: UserError if `size` is no multiple of `parts`, with the nearest that are, and the nearest parts of it."""
    if size % parts:
        near = sorted({max(size // parts, 1) * parts, (size // parts + 1) * parts})
        into = [n for n in range(1, size + 1) if size % n == 0]
        nearest = {max(n for n in into if n < parts), *[n for n in into if n > parts][:1]}
        raise UserError(
            f"cannot split {name}={size} {over} "
            f"({size} % {parts} = {size % parts}); nearest that do: {' or '.join(map(str, near))}; "
            f"{size} splits into {' or '.join(map(str, sorted(nearest)))}"
        )


def exit_status(main):
    """Decorator of a command: what a user can cause ends in one line and an exit status, never in a traceback.

    That of a UserError; 2 for what the system refuses, as for want of space (an OSError's text names the file); 130
    after Ctrl-C; 1, and no line, if the reader of the output has left, as `head` does.
    """

    @functools.wraps(main)
    def wrapped(*args) -> int:
        wrapped.error = ""
        try:
            status = main(*args) or 0
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
            return 1
        except (UserError, OSError) as error:
            with contextlib.suppress(OSError):  # a full disk
                print(f"error: {error}", file=sys.stderr, flush=True)
            if log_error:
                log_error(f"error: {error}")
            wrapped.error = str(error)
            return getattr(error, "status", 2)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130

    return wrapped


def end_quietly() -> None:
    """From now on Ctrl-C ends this process in one line: a command's imports take seconds."""

    def end(*_):
        print("\ninterrupted; nothing is changed", file=sys.stderr, flush=True)
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, end)


def nearest(word: str, known) -> str:
    """Say which known word is closest to a misspelt one, then list a few more, all if they are few."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = list(known) if len(known) <= 12 else difflib.get_close_matches(word, known, n=5, cutoff=0)
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + ", ".join(listed)
