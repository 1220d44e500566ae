"""Pictures that commands write: checked before the work, drawn without a window."""

import os

from devices import cache_directory
from errors import UserError

PICTURES = ("png", "svg", "pdf", "jpg", "webp")


def check_picture(path: str | os.PathLike) -> None:
    """Raises: UserError if a picture cannot be written there, so that a command can say so before it does its work."""
    folder, name = os.path.split(os.fspath(path))
    ending = os.path.splitext(name)[1].removeprefix(".").lower()
    if ending not in PICTURES:
        raise UserError(f"{path}: cannot write a picture ending in {ending!r}; known: {', '.join(PICTURES)}")
    if not os.path.isdir(folder or "."):
        raise UserError(f"{path}: there is no directory {folder}")


def new_picture(**how):
    """An empty matplotlib figure, which no window shows; `figure.savefig(path)` writes it."""
    # Left alone, matplotlib makes a folder for its settings outside the user's cache folder.
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(cache_directory(), "matplotlib"))
    from matplotlib.figure import Figure

    return Figure(layout="constrained", **how)
