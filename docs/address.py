"""The public address of the project: links to Colab, previews, README and CITATION.cff follow from one setting."""

import re

from utils import UserError

# PLACEHOLDER: the project has no public address yet. Set this to the address of the repository, such as
# "https://github.com/NAME/REPOSITORY", and then run `python -m docs.readme`. Empty means not published: nothing links
# to a site or to Colab, preview pictures have relative addresses, and notebooks work only in a checkout.
REPOSITORY = ""
BRANCH = "gh-pages"  # `make pages` commits the built site to this branch, from which GitHub Pages serves it


def owner_and_name() -> tuple[str, str]:
    """Return the owner and the name of the repository if it is on GitHub, else two empty strings.

    Raises: UserError if REPOSITORY is not the address of a repository.
    """
    if not REPOSITORY:
        return "", ""
    found = re.fullmatch(r"https://([\w.-]+)/((?:[\w.-]+/)*[\w.-]+)/([\w.-]+?)(?:\.git)?/?", REPOSITORY)
    if not found:
        raise UserError(f"docs/address.py: REPOSITORY={REPOSITORY!r} is not the address of a repository; use one such "
                        "as https://github.com/NAME/REPOSITORY, or leave it empty")  # fmt: skip
    return (found[2], found[3]) if found[1] == "github.com" else ("", "")


def site() -> str:
    """Return the address of the site, which ends with a slash, or "": GitHub Pages derives it from the repository."""
    owner, name = owner_and_name()
    if not owner:
        return ""
    host = f"{owner.lower()}.github.io"
    return f"https://{host}/" if name.lower() == host else f"https://{host}/{name}/"


def on_branch(folder: str, chapter: str, viewer: str) -> str:
    """Return the address of a notebook on the branch with the site, in a viewer of GitHub's files, or ""."""
    owner, name = owner_and_name()
    return f"https://{viewer}/{owner}/{name}/blob/{BRANCH}/{folder}/{chapter}.ipynb" if owner else ""


def colab(chapter: str) -> str:
    """Return the address at which Colab opens a chapter, or "": Colab reads notebooks from GitHub."""
    return on_branch("notebooks", chapter, "colab.research.google.com/github")


def outputs(chapter: str) -> str:
    """Return the address at which GitHub shows a chapter as a notebook with its outputs, or ""."""
    return on_branch("executed", chapter, "github.com")
