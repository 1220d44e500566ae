"""Write the table of chapters in README.md, and the public addresses everywhere. `python -m docs.readme`."""

import re
import sys
from pathlib import Path

from docs import address, previews
from docs.notebooks import ROOT, chapters
from docs.reference import head
from utils import UserError, exit_status

PAGE, CITATION = ROOT / "README.md", ROOT / "CITATION.cff"
BUILDS = {  # what a reader writes or runs by hand in a chapter
    "00": "the time of a training step from its FLOPs and bytes, for one chip and for 64",
    "01": "a matmul in its four shardings, and a ring reduce-scatter",
    "02": "sharded gradients without autodiff, and gradient accumulation with one sum",
    "03": "FSDP by hand, then each stage from DDP to ZeRO 3",
    "04": "a transformer block that shards heads, hidden units, positions and vocabulary",
    "05": "1F1B with microbatches in one program, compared with GPipe and zero bubble",
    "06": "ring attention with a causal mask, zig-zag order and packed documents",
    "07": "an MoE layer that sends tokens with all-to-alls, and balances its experts",
    "08": "one layer on three axes, and a test that names the axis with the bug",
    "09": "a search for the fastest mesh in 40 lines of arithmetic, and all thresholds on one sheet",
    "10": "a decoder in 45 lines, and the test that finds a wrong one",
    "11": "a loader that reads each token once, also after a restart on other hosts",
    "12": "a training loop that you can kill, and a check for silent corruption",
    "13": "four processes with one mesh, and the diagnosis of a host that fails",
    "14": "prefill and decode with a sharded KV cache, and a batch size for serving",
    "15": "the same layer three ways: by hand, with constraints, with explicit sharding",
    "16": "a reader of traces that splits a step in three, and a loop that no longer stalls",
    "17": "FlashAttention's forward pass in Pallas, used in a ring and compiled for a TPU",
    "18": "data-parallel attention, a prefix cache with pages, and prefill and decode on two slices",
}


def reading_minutes(path: Path) -> str:
    """Return how long the chapter says that reading takes. Raises: UserError if it does not say so."""
    first = " ".join(path.read_text(encoding="utf-8").split("# %%")[1].replace("\n# ", " ").split())
    found = re.search(r"\*Reading takes\* (?:about )?(\d+ minutes|half an hour|an hour)(, with exercises)?", first)
    if not found:
        raise UserError(f"{path.name} does not say in its first cell how long reading takes; write, for example, "
                        "`*Reading takes* 25 minutes.`")  # fmt: skip
    minutes = {"half an hour": "30", "an hour": "60"}.get(found[1], found[1].removesuffix(" minutes"))
    return minutes + (found[2] or "")


def site_links() -> str:
    """Return the line of README that leads to the site, or "" if the project is not published."""
    site = address.site()
    pages = {"the guide": "", "the planner": "planner_widget.html", "the mesh explorer": "mesh_explorer.html"}
    links = [f"[{title}]({site}{page})" for title, page in pages.items()]
    return f"In the browser, without an installation: {', '.join(links[:-1])} and {links[-1]}." if site else ""


def chapter_links(chapter: str) -> str:
    """Return the last cell of a row: the chapter on the site, in Colab, and as a notebook with its outputs."""
    places = {"page": f"{address.site()}chapters/{chapter}.html", "Colab": address.colab(chapter),
              "outputs": address.outputs(chapter)}  # fmt: skip
    return ", ".join(f"[{name}]({place})" for name, place in places.items())


def chapter_table() -> str:
    published = bool(address.site())
    rows = [f"| [{path.stem[:2]}](chapters/{path.name}) | {head(path)['title']} | {BUILDS[path.stem[:2]]} "
            f"| {reading_minutes(path)} |" + f" {chapter_links(path.stem)} |" * published
            for path in chapters()]  # fmt: skip
    first = "| | chapter | what you build | minutes |" + " open |" * published
    return "\n".join([first, "|---|---|---|---|" + "---|" * published, *rows])


def page(text: str) -> str:
    """Return README with the parts that this file writes: from their mark, `<!-- NAME -->`, to the next empty line."""
    for name, part in {"address": site_links(), "chapters": chapter_table()}.items():
        lines = f"<!-- {name} -->\n" + f"{part}\n" * bool(part)
        text = re.sub(rf"<!-- {name} -->\n(?:.+\n)*", lambda _, lines=lines: lines, text)
    return text


def citation(text: str) -> str:
    """Return CITATION.cff with the addresses of the repository and of the site, if the project has them."""
    addresses = {"repository-code": address.REPOSITORY, "url": address.site()}
    kept = [line for line in text.splitlines() if line.split(":")[0] not in addresses]
    return "\n".join(kept + [f"{key}: {value}" for key, value in addresses.items() if value]) + "\n"


@exit_status
def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    CITATION.write_text(citation(CITATION.read_text(encoding="utf-8")), encoding="utf-8")
    print(*["wrote README.md", "CITATION.cff", *(path.relative_to(ROOT) for path in previews.write_pages())], sep=", ")


if __name__ == "__main__":
    sys.exit(main())
