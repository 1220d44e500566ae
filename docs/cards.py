"""Draw the picture that a shared link to a page shows: its title, and eight devices that each hold a shard."""

import hashlib
import textwrap
from pathlib import Path

from docs.pictures import COLOURS

PIXELS = (1200, 630)
AXIS = {"03": "fsdp", "04": "tensor", "05": "stage", "06": "context", "07": "expert"}  # the axis of a chapter
INK, SOFT = "#24292f", "#57606a"


def color(page: str) -> str:
    """Return the color of the chapter's axis; other pages show shards over `fsdp`."""
    return COLOURS[AXIS.get(Path(page).name[:2], "fsdp") if page.startswith("chapters/") else "fsdp"]


def write(file: Path, page: str, title: str) -> None:
    """Write the card of a page, unless the file has the same title and color already."""
    state = hashlib.sha256(Path(__file__).read_bytes() + f"{page} {title}".encode()).hexdigest()
    mark = file.with_suffix(".sha256")
    if file.exists() and mark.exists() and mark.read_text(encoding="utf-8") == state:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draw(page, title).savefig(file, dpi=100)
    mark.write_text(state, encoding="utf-8")


def draw(page: str, title: str):
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=[n / 100 for n in PIXELS], facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, PIXELS[0]), ylim=(PIXELS[1], 0))
    axes.axis("off")
    lines = textwrap.wrap(title, 30)[:3]
    axes.text(70, 70, "\n".join(lines), size=38, weight="bold", color=INK, va="top", linespacing=1.25)
    axes.text(70, 560, "Axis by Axis: n-D parallelism in JAX", size=20, color=SOFT, va="center")
    for device in range(8):
        x, y, side = 70 + device * 134, 330, 118
        axes.add_patch(Rectangle((x, y), side, side, facecolor="#f6f8fa", edgecolor="#8b949e", linewidth=1.5))
        axes.add_patch(Rectangle((x, y + device * side / 8), side, side / 8, facecolor=color(page)))
        axes.text(x + side / 2, y + side + 26, f"{device}", size=15, color=SOFT, ha="center", va="center")
    return figure
