"""Helpers for commands that write figures: check the file name early, and draw without a window."""

import os

from devices import cache_directory
from errors import UserError

PICTURES = ("png", "svg", "pdf", "jpg", "webp")


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
