"""Claims about README.md and docs/: every command runs as it stands there, and what it prints is what is shown."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from docs import build, notebooks, settings
from tests.docs import commands
from tests.docs.commands import NOT_RUN, REPEATS, ROOT, Command

# Pages whose commands go on from those of the pages before them: one working directory, in this order.
CHAINS = (
    ("docs/get_started.md", "README.md", "docs/generate.md", "docs/loop.md", "docs/checkpoints.md", "docs/evaluate.md"),
)
# Pages whose commands take more than 20 s on 2 cores.
SLOW = {"README.md", "docs/get_started.md", "docs/pipelines.md", "docs/meshes.md", "docs/finetune.md"}


def chains():
    """Every page once, as parameters of a test."""
    alone = [(page,) for page in commands.pages() if not any(page in chain for chain in CHAINS)]
    for chain in (*CHAINS, *alone):
        marks = pytest.mark.slow if SLOW & set(chain) else ()
        yield pytest.param(chain, id="+".join(Path(page).stem for page in chain), marks=marks)


def everything() -> list[Command]:
    return [one for page in commands.pages() for one in commands.of_page(page)]


# The commands ---------------------------------------------------------------------------------------------------------


def run_all(found: list[Command], folder: Path) -> None:
    site = commands.make_site(folder)
    for one in found:
        wrong = commands.run(one, site)
        assert wrong is None, wrong


@pytest.mark.parametrize("chain", [*chains()])
def test_every_command_of_a_page_does_what_is_shown(chain, tmp_path):
    """Catches a command that was renamed, one that needs another before it, and a figure that is no longer printed."""
    run_all([one for page in chain for one in commands.to_run(page)], tmp_path)


def tpu_commands():
    """Commands for the TPU compiler, as parameters of a test."""
    for one in (one for page in commands.pages() for one in commands.to_run(page, tpu=True)):
        yield pytest.param(one, id=str(one), marks=pytest.mark.repeat if one.text in REPEATS else ())


def test_links_between_pages_of_the_site_lead_to_a_page():
    """Catches a link that works on GitHub and not on the site, such as README's links, whose page is in docs/ there."""
    found, lost = build.pages(), []
    chapters = {f"chapters/{path.stem}.ipynb" for path in notebooks.chapters()}
    for name, text in found.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            target = os.path.normpath(Path(name).parent / link)
            if target not in {*found, *chapters} and not (build.DOCS / target).exists():
                lost.append((name, link))
    assert not lost


@pytest.mark.tpu
@pytest.mark.parametrize("one", [*tpu_commands()])
def test_a_command_for_the_tpu_compiler_does_what_is_shown(one, tmp_path):
    """Catches the same, of commands that compile for chips which are not here; none needs another before it."""
    run_all([one], tmp_path)


def test_every_command_that_is_only_named_exists(tmp_path):
    """Catches a sentence about a command, or a setting's, that nobody can type any more."""
    run_all(commands.named(everything()), tmp_path)


def test_no_command_is_left_out():
    """Catches a command that no test runs, a reason not to run one that is gone, and a line in a block that looks like
    a command and was read as output."""
    found = everything()
    kinds = ((False, False), (True, False), (False, True))  # tests/launch runs those on hosts
    run = {str(one) for page in commands.pages() for kind in kinds for one in commands.to_run(page, *kind)}
    left = [str(one) for one in found if one.how == commands.RUN and str(one) not in run and one.text not in NOT_RUN]
    assert not left
    assert sum(one.tpu for one in found) >= 5, "the TPU compiler's commands are no longer found"
    assert len(run) > 30, "the pages lost their commands, or they are no longer found"
    assert {*NOT_RUN, *REPEATS} <= {one.text for one in found}, "a row of NOT_RUN or REPEATS stands on no page"
    looks_like_one = re.compile(r"\s*(\$ |python3? |make |\.venv|pip |\./|cd |export |git )")
    for page in commands.pages():
        known = [one.text for one in found if one.page == page]
        for _, kind, lines in commands.parts((ROOT / page).read_text(encoding="utf-8")):
            for line in filter(looks_like_one.match, lines if kind == "block" else ()):
                assert commands.uncommented(line.removeprefix("$ "))[0] in known, f"{page}: {line}"


# What is not a command ------------------------------------------------------------------------------------------------


def test_the_page_of_settings_is_what_config_says():
    """Catches a setting, a default or a preset that was changed in config/ alone. Mend: python -m docs.settings"""
    assert settings.page() == settings.PAGE.read_text(encoding="utf-8")


def test_every_setting_has_a_sentence():
    """Catches a field without a comment, and a comment that the page does not find."""
    rows = [line for line in settings.page().splitlines() if line.startswith("| `--")]
    assert len(rows) > 60
    assert not [row for row in rows if len(row.strip("| ").split(" | ")) < 4]


def test_every_link_leads_somewhere():
    """Catches a page or picture that was moved, a heading that was renamed, and a page that none leads to."""
    reached = {"README.md", "docs/index.md"}  # where a reader of the checkout begins, and one of the site
    for page in commands.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        listed = " ".join(re.findall(r":::\{toctree\}(.*?):::", text, flags=re.DOTALL)).split()
        reached |= {f"docs/{name}.md" for name in listed}
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"\w+://", target):
                continue
            path, _, heading = target.partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), f"{page}: {target}"
            reached.add(there.resolve().relative_to(ROOT).as_posix())
            if heading:
                titles = re.findall(r"(?m)^#+ (.*)$", there.read_text(encoding="utf-8"))
                names = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
                assert heading in names, f"{page}: {target}"
    assert reached >= set(commands.pages()), "no link leads to a page"


def test_an_old_address_of_a_chapter_leads_to_one_that_is_there():
    """Catches a chapter that was renamed, whose old address then leads to nothing, and a new one that an old address
    hides."""
    now = {path.stem for path in notebooks.chapters()}
    assert {*build.MOVED.values()} <= now, "renamed: write the new name in docs/build.py"
    assert not {*build.MOVED} & now, "a page, and what leads on to another, at one address"


def test_a_loop_of_ones_own_takes_25_lines():
    """Catches a training step that needs more and more of what main.py knows."""
    [program] = [lines for _, kind, lines in commands.parts((ROOT / "docs/loop.md").read_text()) if kind == "program"]
    assert len(program) <= 25


def test_every_file_that_is_named_exists():
    """Catches a page that sends its reader to a file which has moved."""
    for page in commands.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|sh|toml|txt|md)|\w+/)`", text):
            assert (ROOT / name).exists() or name.startswith(MADE), f"{page}: {name}"


MADE = ("runs/", "tokens/", "checkpoints/", "samples.txt", "hosts.txt", "__init__.py")  # by a command or you; in rooms
# Listed as a file; started by bench.gpu; started by a run, to send its rows to wandb; parts of docs.build; called by
# `make test-rotation`.
NOT_FOR_HELP = {"bench.deadlock", "bench.torch_trainer", "train.tracking", "docs.notebooks", "docs.reference",
                "tests.rotation", "launch.agent", "launch.hosts"}  # fmt: skip


def test_help_lists_every_command():
    """Catches a command that a newcomer finds only by reading all pages."""
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    name = re.compile(r"(?m)^(python (?:-m )?[\w./]+|make (?:extra-|[\w-]+))")
    listed = set(name.findall(done.stdout))
    wanted = {match[0] for one in everything() if (match := name.match(one.text))}
    assert wanted <= listed, wanted - listed
    for module in (line.removeprefix("python -m ").replace(".", "/") for line in listed if " -m " in line):
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), module
    mains = {path for path in ROOT.glob("*/*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in mains}
    assert {f"python -m {name}" for name in modules - NOT_FOR_HELP} <= listed


# The reader of the pages itself ---------------------------------------------------------------------------------------

PAGE = """\
Type `python a.py 3` and see:

```
took 12 s for 100 cats
...
100 cats, MFU 31.2%
```

```
python b.py   # what for, # twice
python c.py --x "a b"  # exit status 2
$ python d.py
```
"""


def test_the_reader_refuses_what_it_cannot_place():
    """Catches output that belongs to no command, and a line among commands that is none: neither would be tested."""
    with pytest.raises(ValueError, match=r"p\.md:12: not a command: \$ python d\.py"):
        commands.commands("p.md", PAGE)
    first, second, third = commands.commands("p.md", PAGE.replace("$ python d.py\n", ""))
    assert (first.text, first.status, len(first.shown[0])) == ("python a.py 3", 0, 3)
    assert (second.text, second.status) == ("python b.py", 0)
    assert (third.text, third.status) == ('python c.py --x "a b"', 2)
    with pytest.raises(ValueError, match=r"p\.md:4: no command is said to print this block"):
        commands.commands("p.md", "Some words.\n\n```\n1 cat\n```\n")


@pytest.mark.parametrize(
    "shown, printed, why",
    [
        (["100 cats"], "some\n100   cats\nmore", None),
        (["1,000 cats"], "1,009 cats", None),
        (["1,000 cats"], "1,011 cats", "1,000 is shown, 1,011 was printed"),
        (["8 cats"], "9 cats", "8 is shown, 9 was printed"),
        (["8 cats"], "8 dogs", "no such line: 8 cats"),
        (["8 cats", "9 dogs"], "8 cats\n1 bird\n9 dogs", "no such line: 9 dogs"),
        (["8 cats", "...", "9 dogs"], "8 cats\n1 bird\n9 dogs", None),
        (["9 dogs", "...", "8 cats"], "8 cats\n1 bird\n9 dogs", "no output: 8 cats"),
        (["8 cats ... 9 dogs"], "8 cats and 9 dogs", None),
        (["loss 2.00  500 tokens/s"], "loss 2.05  90 tokens/s", None),
        (["loss 2.00  500 tokens/s"], "loss 2.07  90 tokens/s", "2.00 is shown, 2.07 was"),
        (["MFU 9.0%"], "MFU 9.2%", "9.0 is shown, 9.2 was printed"),
        (["2.0e-07 of 1e-05"], "7.1e-08 of 1e-05", None),
        (["2.0e-07 of 1e-05"], "2.0e-07 of 1e-04", "1e-05 is shown, 1e-04 was printed"),
        (["│ 3.2 GiB │ -37.8% │"], "│ 3.2 GiB │ -37.1% │", None),
        (["mesh v4:4x4x2 fsdp=8"], "mesh v4:4x4x4 fsdp=8", "no such line"),
    ],
)  # fmt: skip
def test_what_was_printed_is_compared(shown, printed, why):
    """Catches a comparison that lets a wrong figure pass, or refuses a right one."""
    found = commands.missing(shown, printed)
    assert (found is None) if why is None else (found and found.startswith(why)), found


@pytest.mark.parametrize(
    "words, status, shown, why",
    [
        ("echo 3 cats", 0, ["3 cats"], None),
        ("echo 3 cats", 0, ["4 cats"], "4 is shown, 3 was printed"),
        ("echo 3 cats; exit 2", 0, ["3 cats"], "ended with status 2, the page says 0"),
        ("exit 2", 2, [], None),
        ("python -c 'import os, sys; print(sys.prefix == os.path.realpath(\".venv\"), os.path.exists(\"README.md\"))'",
         0, ["True True"], None),
    ],
)  # fmt: skip
def test_a_command_is_run_as_it_stands(words, status, shown, why, tmp_path):
    """Catches a runner that overlooks an exit status or an output, or runs another Python than the page's reader."""
    one = Command("p.md", 1, words, status=status, shown=[shown] if shown else [])
    found = commands.run(one, commands.make_site(tmp_path))
    assert (found is None) if why is None else why in found, found
