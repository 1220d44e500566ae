"""Build the site, and commit it to a local branch, from which a web server can publish it. `python -m docs.pages`."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import tyro

from docs import address, build, notebooks
from docs.reference import head
from utils import UserError, exit_status

HELP = """e.g. python -m docs.pages
     python -m docs.pages --built            # commit the site that `make site` has built, without building it
     python -m docs.pages 11 --branch preview    # only these chapters, to preview a page

Build the guide, and commit it to a local branch: the site, notebooks/ for Colab, and executed/ with the outputs.

The commit is added to the history of the branch. Your files, the index and other branches don't change, and nothing is
pushed: `git push origin gh-pages` does that. Needs `make extra-site`."""

SUBJECT = "Site of commit"  # how the commits of this file begin
README = """\
# Axis by Axis: the built site

`make pages` writes this branch. `index.html` is the first page of the site. The chapters with their outputs:

"""


def git(checkout: Path, *words, stdin: str | None = None, index: str = "", ok_to_fail: bool = False) -> str:
    """Return what git prints, or "" if it fails and may. Raises: UserError with git's message."""
    env = os.environ | ({"GIT_INDEX_FILE": index} if index else {})
    done = subprocess.run(["git", "-c", "core.autocrlf=false", *map(str, words)], cwd=checkout, env=env, input=stdin,
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode and not ok_to_fail:
        raise UserError(f"git {words[0]} failed: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout.strip()


def previous(checkout: Path, branch: str) -> tuple[str, str]:
    """Return the commit that the next one follows, or "", and the commit of the local branch, or "".

    Raises: UserError if the branch is checked out, or has commits of somebody else.
    """
    if f"branch refs/heads/{branch}\n" in git(checkout, "worktree", "list", "--porcelain") + "\n":
        raise UserError(f"the branch {branch} is checked out; switch to another branch there, or pass another --branch")
    local, remote = (git(checkout, "rev-parse", "--verify", "--quiet", f"refs/{kind}/{branch}", ok_to_fail=True)
                     for kind in ("heads", "remotes/origin"))  # fmt: skip
    before = local or remote
    if before and not git(checkout, "show", "--no-patch", "--format=%s", before).startswith(SUBJECT):
        raise UserError(f"the last commit of the branch {branch} is not from `make pages`, which would replace its "
                        "files; pass another --branch")  # fmt: skip
    return before, local


def commit(folder: Path, more: dict[str, str], branch: str, checkout: Path = notebooks.ROOT) -> str:
    """Add a commit with the files of a folder, and with `more` (path -> text), to a branch. Return the commit.

    Without a change there is no new commit. The branch moves last, and only if nobody else has moved it meanwhile.
    """
    before, local = previous(checkout, branch)
    with tempfile.TemporaryDirectory() as place:
        index, store = f"{place}/index", git(checkout, "rev-parse", "--absolute-git-dir")
        git(folder, f"--git-dir={store}", f"--work-tree={folder}", "add", "--all", "--force", ".", index=index)
        for path, text in more.items():
            blob = git(checkout, "hash-object", "-w", "--stdin", stdin=text)
            git(checkout, "update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", index=index)
        tree = git(checkout, "write-tree", index=index)
    made = before
    if not before or git(checkout, "rev-parse", f"{before}^{{tree}}") != tree:
        source = git(checkout, "rev-parse", "--short", "HEAD")
        edited = " and uncommitted edits" * bool(git(checkout, "status", "--porcelain"))
        parent = ("-p", before) if before else ()
        made = git(checkout, "commit-tree", tree, *parent, "-m", f"{SUBJECT} {source}{edited}")
    git(checkout, "update-ref", f"refs/heads/{branch}", made, local or "0" * 40)
    return made


def executed_notebooks(numbers=()) -> dict[str, str]:
    """Return the readers' notebooks with their outputs, and a page that lists them, by path on the branch."""
    import nbformat

    found = {f"executed/{path.stem}.ipynb": nbformat.writes(notebooks.with_outputs(path, build.EXECUTED))
             for path in notebooks.chapters(numbers)}  # fmt: skip
    rows = [f"- [{path.stem[:2]} · {head(path)['title']}](executed/{path.stem}.ipynb)"
            for path in notebooks.chapters(numbers)]  # fmt: skip
    return found | {"README.md": README + "\n".join(rows) + "\n", ".nojekyll": ""}


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # first digits of chapters; default: all
    branch: str = address.BRANCH  # the local branch that gets the commit
    built: bool = False  # commit the site that is in docs/_build/html, without building it


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.pages", description=HELP)
    previous(notebooks.ROOT, args.branch)  # fail before a build of minutes
    if not args.built:
        build.build(args.numbers)
    if not (build.HTML / "index.html").exists():
        raise UserError("there is no site yet: build it with `make site`, or leave out --built")
    made = commit(build.HTML, executed_notebooks(args.numbers), args.branch)
    print(f"branch {args.branch} is at {made[:10]}; `git push origin {args.branch}` publishes it")
    if not address.REPOSITORY:
        print("docs/address.py has no address yet, so the site has no links to Colab, and previews may lack pictures")


if __name__ == "__main__":
    sys.exit(main())
