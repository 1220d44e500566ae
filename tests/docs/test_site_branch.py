"""`make pages` commits the built site to a branch, and changes nothing else."""

import re
import subprocess

import pytest

from docs import pages
from utils import UserError


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit and an uncommitted file, and a built site in a folder that git ignores."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    folder = tmp_path / "checkout"
    (folder / "html/_static").mkdir(parents=True)
    (folder / "html/index.html").write_text("<p>first</p>\n")
    (folder / "html/_static/site.css").write_text("p {}\r\n")
    (folder / ".gitignore").write_text("html/\n_static\n")
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "main", folder], check=True)
    pages.git(folder, "add", ".")
    pages.git(folder, "commit", "--quiet", "-m", "Begin")
    (folder / "new.txt").write_text("not committed\n")
    (folder / ".git/info/exclude").write_text("*.css\n")
    return folder


def state(folder) -> list[str]:
    words = ("symbolic-ref HEAD", "rev-parse HEAD", "status --porcelain", "ls-files --stage")
    return [pages.git(folder, *one.split()) for one in words]


def test_the_site_is_committed_without_touching_the_checkout(checkout):
    """Catches a publisher that switches branches, loses edits or history, skips ignored files, or changes line ends."""
    before, more = state(checkout), {"executed/00.ipynb": "{}", ".nojekyll": ""}
    first = pages.commit(checkout / "html", more, "gh-pages", checkout)
    assert pages.commit(checkout / "html", more, "gh-pages", checkout) == first  # nothing has changed
    (checkout / "html/index.html").write_text("<p>second</p>\n")
    second = pages.commit(checkout / "html", more, "gh-pages", checkout)
    assert state(checkout) == before
    assert pages.git(checkout, "rev-parse", "gh-pages", "gh-pages^").split() == [second, first]
    names = pages.git(checkout, "ls-tree", "-r", "--name-only", "gh-pages").split()
    assert names == [".nojekyll", "_static/site.css", "executed/00.ipynb", "index.html"]
    css = subprocess.run(["git", "cat-file", "blob", "gh-pages:_static/site.css"], cwd=checkout, capture_output=True)
    assert css.stdout == b"p {}\r\n"
    assert re.fullmatch(
        r"Site of commit \w+ and uncommitted edits", pages.git(checkout, "log", "-1", "--format=%s", second)
    )


def test_a_fresh_clone_continues_the_published_branch(checkout, tmp_path):
    """Catches a new history that can only be pushed with --force, which destroys the published one."""
    first = pages.commit(checkout / "html", {}, "gh-pages", checkout)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", checkout, clone], check=True)
    (checkout / "html/index.html").write_text("<p>second</p>\n")
    second = pages.commit(checkout / "html", {}, "gh-pages", clone)
    assert pages.git(clone, "rev-parse", f"{second}^") == first
    pages.git(clone, "push", "--quiet", "origin", "gh-pages")
    assert pages.git(checkout, "rev-parse", "gh-pages") == second


def test_a_branch_of_somebody_else_is_left_alone(checkout):
    """Catches a publisher that replaces the files of a branch that it did not write, or of one that is checked out."""
    pages.git(checkout, "branch", "gh-pages")
    own = pages.git(checkout, "rev-parse", "gh-pages")
    with pytest.raises(UserError, match="the last commit of the branch gh-pages is not from `make pages`"):
        pages.commit(checkout / "html", {}, "gh-pages", checkout)
    with pytest.raises(UserError, match="the branch main is checked out; switch to another branch there"):
        pages.commit(checkout / "html", {}, "main", checkout)
    assert pages.git(checkout, "rev-parse", "gh-pages") == own
