"""What every command uses: errors that a user can cause, messages on process 0, and figures. It imports no JAX."""

import contextlib
import difflib
import functools
import io
import os
import signal
import sys
import time
from pathlib import Path

# Errors ---------------------------------------------------------------------------------------------------------------


class UserError(ValueError):
    """An error that the user can fix. Commands print its message without a traceback and exit with `status`."""

    status = 2


class DiskLost(UserError):
    """The disk that a command writes to is unavailable. It may come back, so launcher.sh restarts the command."""

    status = 75  # EX_TEMPFAIL in sysexits.h


def require_multiple(name: str, size: int, parts: int, over: str, axes: str = "") -> None:
    """Raises: UserError if `size` is not a multiple of `parts`; it lists the nearest sizes and part counts that fit.

    axes  the axes of the mesh whose product is `parts`
    """
    if size % parts:
        near = sorted({max(size // parts, 1) * parts, (size // parts + 1) * parts})
        into = [n for n in range(1, size + 1) if size % n == 0]
        nearest = {max(n for n in into if n < parts), *[n for n in into if n > parts][:1]}
        counts = " or ".join(map(str, sorted(nearest)))
        raise UserError(
            f"cannot split {name}={size} {over} "
            f"({size} % {parts} = {size % parts}); use {name}={' or '.join(map(str, near))}, "
            + (f"or a --mesh with {axes} = {counts}" if axes else f"or split {size} into {counts} parts")
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
            log_to_file(f"error: {error}")
            wrapped.error = str(error)
            return getattr(error, "status", 2)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130

    return wrapped


def parse_early(parse):
    """Return parse(this process's arguments). A command calls this before slow imports, such as JAX's.

    A mistake is then reported at once, and ends the process with its status; so does --help.
    """
    parsed = []
    if status := exit_status(lambda: parsed.append(parse(sys.argv[1:])))():
        sys.exit(status)
    return parsed[0]


def exit_quietly_on_ctrl_c() -> None:
    """Make Ctrl-C end this process with a one-line message. A command calls this first: its imports take seconds."""

    def end(*_):
        print("\ninterrupted; nothing was changed", file=sys.stderr, flush=True)
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the shell ignores SIGINT
        signal.signal(signal.SIGINT, end)


FEW = 20  # list this many known words at most


def suggest(word: str, known, all_of_them: str = "") -> str:
    """Return "did you mean .." with the most similar known word, then the known words.

    all_of_them  a command or page that lists all; if there are many, only the 5 closest are listed here
    """
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = "known: " + ", ".join(known)
    if len(known) > FEW:
        listed = f"closest of {len(known)}: " + ", ".join(difflib.get_close_matches(word, known, n=5, cutoff=0))
        listed += f"; all: {all_of_them}" if all_of_them else ""
    return (f"did you mean {close[0]!r}? " if close else "") + listed


# Logging --------------------------------------------------------------------------------------------------------------


def is_main_process() -> bool:
    """Whether this is process 0, which prints and writes files. Always True before JAX is imported."""
    return "jax" not in sys.modules or sys.modules["jax"].process_index() == 0


def log(*words) -> None:
    """Print on process 0, or on every process that a supervisor started. Also write to the log file, if any."""
    if is_main_process() or "AXIS_PROGRESS" in os.environ:
        print(*words, flush=True)
    log_to_file(*words)


def duration(seconds: float) -> str:
    """Return a duration in words, such as `40 s` or `3 minutes`."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


_log_file = None


def log_to_file(*words) -> None:
    if _log_file:
        print(time.strftime("%F %T "), *words, file=_log_file, flush=True)


class LossyFile(io.FileIO):
    """A text file that ignores write errors, such as a full disk: the text is lost, but the run continues."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader of the pipe has exited
            raise
        except OSError:
            return len(data)


def open_lossy(file: Path | int, mode: str = "w") -> io.TextIOWrapper:
    """Open a path or descriptor as a line-buffered `LossyFile`. Raises: OSError if it cannot be opened."""
    return io.TextIOWrapper(io.BufferedWriter(LossyFile(file, mode)), "utf-8", "backslashreplace", line_buffering=True)


def open_log(path: Path) -> None:
    """Append all further log messages to this file too. A full disk does not stop the run."""
    global _log_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _log_file = open_lossy(path, "a")
    except OSError as error:
        log(f"note: cannot write the log file {path}: {error.strerror}")


def log_files() -> list:
    """Return the files for messages of a single process: its standard error and its log file."""
    return [sys.stderr, *([_log_file] if _log_file else [])]


def cache_directory() -> str:
    """Return the user's cache folder for this project: $XDG_CACHE_HOME/axis-by-axis, or ~/.cache/axis-by-axis."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "axis-by-axis")


# Figures --------------------------------------------------------------------------------------------------------------

PICTURES = ("png", "svg", "pdf", "jpg", "webp")


def replace_file(path: str | os.PathLike, contents: str | bytes) -> None:
    """Write a file atomically."""
    partial = f"{path}.partial"
    Path(partial).write_bytes(contents.encode() if isinstance(contents, str) else contents)
    os.replace(partial, path)


def check_picture(path: str | os.PathLike) -> None:
    """Raises: UserError if a figure cannot be written to `path`. Commands call this before their work."""
    folder, name = os.path.split(os.fspath(path))
    ending = os.path.splitext(name)[1].removeprefix(".").lower()
    if ending not in PICTURES:
        raise UserError(f"{path}: cannot write a figure ending in {ending!r}; known: {', '.join(PICTURES)}")
    if not os.path.isdir(folder or "."):
        raise UserError(f"{path}: there is no directory {folder}")


def new_picture(**how):
    """Return an empty matplotlib figure without a window; `figure.savefig(path)` writes it."""
    # By default matplotlib would create a settings folder outside the user's cache folder.
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(cache_directory(), "matplotlib"))
    from matplotlib.figure import Figure

    return Figure(layout="constrained", **how)
