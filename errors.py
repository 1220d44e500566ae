"""Errors that a user can cause, and the decorator with which commands report them in one line."""

import contextlib
import difflib
import functools
import os
import signal
import sys

log_error = None  # `devices.open_log` sets it, to write the final error message to the log file too


class UserError(ValueError):
    """An error that the user can fix. Commands print its message without a traceback and exit with `status`."""

    status = 2


class DiskLost(UserError):
    """The disk that a command writes to is unavailable. It may come back, so launcher.sh restarts the command."""

    status = 75  # EX_TEMPFAIL in sysexits.h


def require_multiple(name: str, size: int, parts: int, over: str) -> None:
    """Raises: UserError if `size` is not a multiple of `parts`; it lists the nearest sizes and part counts that fit."""
    if size % parts:
        near = sorted({max(size // parts, 1) * parts, (size // parts + 1) * parts})
        into = [n for n in range(1, size + 1) if size % n == 0]
        nearest = {max(n for n in into if n < parts), *[n for n in into if n > parts][:1]}
        raise UserError(
            f"cannot split {name}={size} {over} "
            f"({size} % {parts} = {size % parts}); use {name}={' or '.join(map(str, near))}, "
            f"or split {size} into {' or '.join(map(str, sorted(nearest)))} parts"
        )


def exit_status(main):
    """Decorate a command: report an error that a user can cause in one line, without a traceback, and return a status.

    The exit status is the one of a UserError; 2 for an OSError, such as a full disk (its text names the file); 130
    after Ctrl-C; 1, without a message, if the reader of the output has exited, as `head` does.
    """

    @functools.wraps(main)
    def wrapped(*args) -> int:
        wrapped.error = ""
        try:
            status = main(*args) or 0
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
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


def exit_quietly_on_ctrl_c() -> None:
    """Make Ctrl-C end this process with a one-line message. A command calls this first: its imports take seconds."""

    def end(*_):
        print("\ninterrupted; nothing was changed", file=sys.stderr, flush=True)
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the shell ignores SIGINT
        signal.signal(signal.SIGINT, end)


def suggest(word: str, known) -> str:
    """Return "did you mean .." with the most similar known word, then all known words; if over 12, the 5 nearest."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = list(known) if len(known) <= 12 else difflib.get_close_matches(word, known, n=5, cutoff=0)
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + ", ".join(listed)
