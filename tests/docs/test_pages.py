"""Tests of README.md and docs/: every command runs as shown there, and prints what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import build, notebooks, settings
from tests.docs import commands
from tests.docs.commands import NOT_RUN, REPEATS, ROOT, Command

# Pages whose commands need the results of the pages before: they run in one working directory, in this order.
CHAINS = (
    ("docs/get_started.md", "README.md", "docs/generate.md", "docs/loop.md", "docs/checkpoints.md", "docs/evaluate.md"),
)
# Pages whose commands take more than 20 s on 2 cores.
SLOW = {"README.md", "docs/get_started.md", "docs/pipelines.md", "docs/check_a_mesh.md", "docs/choose_a_mesh.md",
        "docs/finetune.md", "docs/objectives.md", "docs/encoder_decoder.md"}  # fmt: skip


def chains():
    """Yield every page once, as test parameters."""
    alone = [(page,) for page in commands.pages() if not any(page in chain for chain in CHAINS)]
    for chain in (*CHAINS, *alone):
        marks = pytest.mark.slow if SLOW & set(chain) else ()
        yield pytest.param(chain, id="+".join(Path(page).stem for page in chain), marks=marks)


def everything() -> list[Command]:
    return [one for page in commands.pages() for one in commands.page_commands(page)]


# The commands ---------------------------------------------------------------------------------------------------------


def run_all(found: list[Command], folder: Path) -> None:
    site = commands.make_site(folder)
    for one in found:
        wrong = commands.run(one, site)
        assert wrong is None, wrong


@pytest.mark.parametrize("chain", [*chains()])
def test_every_command_on_a_page_prints_what_the_page_shows(chain, tmp_path):
    """Catches a renamed command, one that needs another before it, and a number that is no longer printed."""
    run_all([one for page in chain for one in commands.to_run(page)], tmp_path)


def tpu_commands():
    """Yield the commands for the TPU compiler, as test parameters."""
    for one in (one for page in commands.pages() for one in commands.to_run(page, tpu=True)):
        yield pytest.param(one, id=str(one), marks=pytest.mark.repeat if one.text in REPEATS else ())


def test_links_between_pages_of_the_site_work():
    """Catches a link that works on GitHub but not on the site, such as a link in README, which moves to docs/ there."""
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
def test_a_command_for_the_tpu_compiler_prints_what_the_page_shows(one, tmp_path):
    """Catches wrong output of commands that compile for TPUs. None of them needs another command before it."""
    run_all([one], tmp_path)


def test_every_command_named_in_the_text_exists(tmp_path):
    """Catches a sentence about a command that no longer exists."""
    run_all(commands.commands_only_named(everything()), tmp_path)


def test_every_command_is_tested_or_excused():
    """Catches a command that no test runs, an excuse for a command that is gone, and a command in a block that was
    parsed as output."""
    found = everything()
    kinds = ((False, False), (True, False), (False, True))  # tests/launch runs those on hosts
    run = {str(one) for page in commands.pages() for kind in kinds for one in commands.to_run(page, *kind)}
    left = [str(one) for one in found if one.how == commands.RUN and str(one) not in run and one.text not in NOT_RUN]
    assert not left
    assert sum(one.tpu for one in found) >= 5, "the commands for the TPU compiler were not found"
    assert len(run) > 30, "the commands of the pages were not found"
    assert {*NOT_RUN, *REPEATS} <= {one.text for one in found}, "a row of NOT_RUN or REPEATS is on no page"
    looks_like_one = re.compile(r"\s*(\$ |python3? |make |\.venv|pip |\./|cd |export |git )")
    for page in commands.pages():
        known = [one.text for one in found if one.page == page]
        for _, kind, lines in commands.page_parts((ROOT / page).read_text(encoding="utf-8")):
            for line in filter(looks_like_one.match, lines if kind == "block" else ()):
                assert commands.uncommented(line.removeprefix("$ "))[0] in known, f"{page}: {line}"


# Settings, links and files --------------------------------------------------------------------------------------------


def test_the_page_of_settings_is_what_config_says():
    """Catches a setting, default or preset that changed only in config/. To fix the page: python -m docs.settings"""
    assert settings.page() == settings.PAGE.read_text(encoding="utf-8")


def test_every_setting_has_a_sentence():
    """Catches a field without a comment, and a comment that is missing on the page."""
    rows = [line for line in settings.page().splitlines() if line.startswith("- `--")]
    assert len(rows) > 60
    assert not [row for row in rows if len(row.partition("`: ")[2]) < 10]


def test_every_link_works_and_every_page_is_linked():
    """Catches a moved page or picture, a renamed heading, and a page without a link to it."""
    reached = {"README.md", "docs/index.md"}  # the start pages on GitHub and on the site
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
    assert reached >= set(commands.pages()), "a page has no link to it"


def test_redirects_of_chapters_lead_to_existing_chapters():
    """Catches a redirect to a renamed chapter, and a redirect at the address of a chapter."""
    now = {path.stem for path in notebooks.chapters()}
    assert {*build.MOVED.values()} <= now, "a chapter was renamed: write its new name in docs/build.py"
    assert not {*build.MOVED} & now, "a chapter and a redirect have the same address"


def test_a_custom_training_loop_takes_25_lines():
    """Catches a training step that needs more and more setup from main.py."""
    [program] = [
        lines for _, kind, lines in commands.page_parts((ROOT / "docs/loop.md").read_text()) if kind == "program"
    ]
    assert len(program) <= 25


def test_every_file_that_is_named_exists():
    """Catches a page that names a file which has moved."""
    for page in commands.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|sh|toml|txt|md)|\w+/)`", text):
            assert (ROOT / name).exists() or name.startswith(MADE), f"{page}: {name}"


# Made by commands and users; packages have an __init__.py
MADE = ("runs/", "tokens/", "checkpoints/", "profile/", "evaluations/", "samples.txt", "parameters.txt", "hosts.txt",
        "__init__.py")  # fmt: skip
# Modules that `make help` omits: started by bench.gpu or by a run (to send its rows to wandb), parts of docs.build,
# called by `make test-rotation`, listed as a file, or the writer of a file of chapter 16.
NOT_FOR_HELP = {"bench.deadlock", "bench.torch_trainer", "chapters.tpu_step", "train.tracking", "docs.notebooks",
                "docs.reference", "tests.rotation", "tests.seconds", "launch.agent", "launch.hosts"}  # fmt: skip


def test_help_lists_every_command():
    """Catches a command that `make help` does not list."""
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


def test_pages_have_the_minutes_of_make_help():
    """Catches a target of make that takes another time on each page that names it."""
    text = re.findall(r"(?m)^([\w-]+):.*## .*?([\d.]+) minutes", (ROOT / "Makefile").read_text())
    minutes = dict(text)
    assert {"train", "test", "chapters", "rehearse"} <= set(minutes)
    readme, tests = ((ROOT / name).read_text().replace("\n", " ") for name in ("README.md", "docs/tests.md"))
    told = re.findall(r"- `make (\w+)` (?:(?!- `make).)*?([\d.]+)\s+minutes", readme)
    told += re.findall(r"\| `make ([\w-]+)` \| ~?([\d.]+) \|", tests)
    told += re.findall(r"make ([\w-]+) +# [^#]*?([\d.]+) minutes", tests) + [
        ("test", re.search(r"took (\d+) min", tests)[1])
    ]
    assert len(told) >= 8
    assert not [(target, n, minutes[target]) for target, n in told if target in minutes and n != minutes[target]]


def test_writing_notebooks_ends_with_how_to_open_one(monkeypatch, capsys):
    """Catches `make notebooks` that leaves a newcomer with files that nothing in .venv opens."""
    monkeypatch.setattr(notebooks, "write", lambda numbers: [ROOT / f"notebooks/{n}.ipynb" for n in numbers])
    monkeypatch.setattr(sys, "argv", ["docs.notebooks", "00", "01"])
    assert notebooks.main() == 0
    *files, last = capsys.readouterr().out.splitlines()
    assert files == ["wrote notebooks/00.ipynb", "wrote notebooks/01.ipynb"]
    assert ".venv/bin/python as its kernel in VS Code" in last and "-m ipykernel install" in last
    assert "ipykernel" in {pin.split("==")[0] for pin in (ROOT / "requirements/site.txt").read_text().split()}


# The parser of the pages -----------------------------------------------------------------------------------------

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


def test_the_parser_refuses_unknown_lines_and_blocks():
    """Catches output without a command, and a line among commands that is not a command. Neither would be tested."""
    with pytest.raises(ValueError, match=r"p\.md:12: not a command: \$ python d\.py"):
        commands.commands("p.md", PAGE)
    first, second, third = commands.commands("p.md", PAGE.replace("$ python d.py\n", ""))
    assert (first.text, first.status, len(first.shown[0])) == ("python a.py 3", 0, 3)
    assert (second.text, second.status) == ("python b.py", 0)
    assert (third.text, third.status) == ('python c.py --x "a b"', 2)
    with pytest.raises(ValueError, match=r"p\.md:4: no command before this block of output"):
        commands.commands("p.md", "Some words.\n\n```\n1 cat\n```\n")


@pytest.mark.parametrize(
    "shown, printed, why",
    [
        (["100 cats"], "some\n100   cats\nmore", None),
        (["1,000 cats"], "1,009 cats", None),
        (["1,000 cats"], "1,011 cats", "the page shows 1,000, the command printed 1,011"),
        (["8 cats"], "9 cats", "the page shows 8, the command printed 9"),
        (["8 cats"], "8 dogs", "no such line: 8 cats"),
        (["8 cats", "9 dogs"], "8 cats\n1 bird\n9 dogs", "no such line: 9 dogs"),
        (["8 cats", "...", "9 dogs"], "8 cats\n1 bird\n9 dogs", None),
        (["9 dogs", "...", "8 cats"], "8 cats\n1 bird\n9 dogs", "no output: 8 cats"),
        (["8 cats ... 9 dogs"], "8 cats and 9 dogs", None),
        (["loss 2.00  500 tokens/s"], "loss 2.05  90 tokens/s", None),
        (["loss 2.00  500 tokens/s"], "loss 2.07  90 tokens/s", "the page shows 2.00, the command printed 2.07"),
        (["MFU 9.0%"], "MFU 9.2%", "the page shows 9.0, the command printed 9.2"),
        (["2.0e-07 of 1e-05"], "7.1e-08 of 1e-05", None),
        (["2.0e-07 of 1e-05"], "2.0e-07 of 1e-04", "the page shows 1e-05, the command printed 1e-04"),
        (["│ 3.2 GiB │ -37.8% │"], "│ 3.2 GiB │ -37.1% │", None),
        (["mesh v4:4x4x2 fsdp=8"], "mesh v4:4x4x4 fsdp=8", "no such line"),
    ],
)  # fmt: skip
def test_printed_output_is_compared(shown, printed, why):
    """Catches a comparison that accepts a wrong number, or refuses a correct one."""
    found = commands.first_difference(shown, printed)
    assert (found is None) if why is None else (found and found.startswith(why)), found


@pytest.mark.parametrize(
    "words, status, shown, why",
    [
        ("echo 3 cats", 0, ["3 cats"], None),
        ("echo 3 cats", 0, ["4 cats"], "the page shows 4, the command printed 3"),
        ("echo 3 cats; exit 2", 0, ["3 cats"], "exit status 2, expected 0"),
        ("exit 2", 2, [], None),
        ("python -c 'import os, sys; print(sys.prefix == os.path.realpath(\".venv\"), os.path.exists(\"README.md\"))'",
         0, ["True True"], None),
    ],
)  # fmt: skip
def test_a_command_runs_as_a_reader_would_run_it(words, status, shown, why, tmp_path):
    """Catches a runner that ignores an exit status or an output, or runs another Python than a reader's."""
    one = Command("p.md", 1, words, status=status, shown=[shown] if shown else [])
    found = commands.run(one, commands.make_site(tmp_path))
    assert (found is None) if why is None else why in found, found
