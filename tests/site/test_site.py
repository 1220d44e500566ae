"""Tests of the built site in a headless Chromium. `make test-site` builds the site and runs them."""

import json
import os
import re
import subprocess
import sys
from urllib.parse import urldefrag

import pytest

from chapters import folded
from docs import address, build, layer_timeline, notebooks
from docs.notebooks import ROOT
from tests.site import browser
from utils import UserError

pytestmark = pytest.mark.site


def names() -> list[str]:
    """List the pages of the site, except the search page and redirects."""
    found = {path.relative_to(build.HTML).as_posix() for path in build.HTML.rglob("*.html")} - {*build.forwards()}
    return sorted(name for name in found if not name.startswith(("_static", "search", "genindex")))


def notebook(file):
    import nbformat  # imported here because it is an extra, and pytest collects these tests without it

    return nbformat.read(file, as_version=4)


@pytest.fixture(scope="module")
def seen():
    """Collect the browser's report on every page, a search, dark mode, the planner and the explorers."""
    return json.loads(browser.look("report", *names()))


def pages(seen) -> dict[str, dict]:
    return {page["page"]: page for page in seen["pages"]}


def test_every_chapter_and_page_is_there(seen):
    """Catches a chapter that was not built, and a page without its text."""
    found = pages(seen)
    wanted = [f"chapters/{path.stem}.html" for path in notebooks.chapters()]
    wanted += [f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")]
    assert wanted, "there are no chapters"
    assert not {*wanted} - {*found}
    assert not [name for name, page in found.items() if page["words"] < 40]
    assert not [name for name in wanted if name.startswith("chapters/") and found[name]["words"] < 1500]


def test_no_page_has_an_error(seen):
    """Catches a script that fails, and a missing picture or file."""
    everything = [*seen["pages"], *(seen[name] for name in ("search", "dark", "widget", "mesh", "schedule", "layer"))]
    assert not [(one.get("page"), one["errors"]) for one in everything if one["errors"]]
    assert not {name: page["broken_pictures"] for name, page in pages(seen).items() if page["broken_pictures"]}


def test_no_page_loads_files_from_other_hosts(seen):
    """Catches a theme or extension that loads fonts, styles or scripts from a CDN: the guide must work offline."""
    everything = [*seen["pages"], *(seen[name] for name in ("search", "dark", "widget", "mesh", "schedule", "layer"))]
    assert not [(one.get("page"), one["foreign"]) for one in everything if one["foreign"]]


@pytest.mark.parametrize("device", ["phone", "desk"])
def test_no_page_is_wider_than_the_screen(seen, device):
    """Catches code, a table or a picture without its own scroll bar, at 390 and at 1280 pixels."""
    wide = {name: page[device] for name, page in pages(seen).items()
            if page[device]["beyond"] > 0 or page[device]["sticking_out"]}  # fmt: skip
    assert not wide


def test_search_finds_a_term(seen):
    """Catches a search that needs a server, or does not include the chapters."""
    found = seen["search"]["found"]
    assert any(name.startswith("chapters/") for name in found), found
    assert any("glossary" in name for name in found), found


def test_dark_mode_changes_page_and_pictures(seen):
    """Catches dark lines on a dark background: pictures are drawn for a light page and must be inverted."""
    light, dark = seen["dark"]["seen"]["light"], seen["dark"]["seen"]["dark"]
    assert (light["theme"], dark["theme"]) == ("light", "dark")
    level = lambda state: sum(map(int, re.findall(r"\d+", state["ground"])[:3])) / 3
    assert level(light) > 200
    assert level(dark) < 60
    assert "invert" not in light["filter"]
    assert "invert(1)" in dark["filter"]


def test_math_is_rendered(seen):
    """Catches formulas shown as TeX source."""
    page = pages(seen)["how_to_read.html"]
    assert page["math"] >= 2
    assert not [name for name, page in pages(seen).items() if page["small_math"]]
    text = (build.HTML / "how_to_read.html").read_text(encoding="utf-8")
    assert "\\frac" not in re.sub(r"<annotation.*?</annotation>", "", text, flags=re.DOTALL)


def test_the_planner_computes(seen):
    """Catches a planner whose controls do nothing, or whose step time differs from docs/planner.md."""
    before, after = seen["widget"]["before"], seen["widget"]["after"]
    assert "fsdp=32 on 32 TPU v4" in before
    assert "fsdp=32,tensor=2 on 64 TPU v4" in after
    page = (build.ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    page = page.partition("\n$ python -m plan moe1b --topology v4:2x4x4\n")[2]  # the mesh on the page, not the search
    step, mfu = re.search(r"^step +([\d.]+) s, .*; MFU ([\d.]+%)$", page, re.MULTILINE).groups()
    bound, simulated, _ = re.search(r"│ all +│ +([\d.]+) s │ +([\d.]+) s │ +([\d.]+) s │", page).groups()
    in_ms = lambda seconds: f"{1000 * float(seconds):.0f} ms"
    assert re.search(rf"step {in_ms(step)} \(.* measured steps\), MFU {mfu}", before)
    assert f"all links, is {in_ms(bound)}; a simulation" in before and f"take about {in_ms(simulated)}" in before


def test_the_mesh_explorer_works_with_the_keyboard(seen):
    """Catches devices, lines and arrays that need a mouse, and a mesh that is too large to draw."""
    mesh = seen["mesh"]
    assert mesh["moved"]["device"] == "Device 5: fsdp 1, tensor 1"
    assert mesh["moved"]["focus"] == "5"
    assert mesh["moved"]["pictures"] > 15
    assert mesh["line"]["marked"] == [1, 5]
    assert "over fsdp" in mesh["line"]["said"]
    assert mesh["array"]["marked"] == [5]
    assert mesh["full"]["sizes"] == [1, 4, 2, 1, 1, 4]
    assert "Up to 32 devices" in mesh["full"]["said"]


def test_the_schedule_explorer_plays_a_schedule(seen):
    """Catches a button that does nothing, playback beyond the end of the schedule, and an invalid schedule."""
    seen = seen["schedule"]
    assert seen["start"]["drawn"] == [1, 1]
    assert seen["on"]["drawn"] == [3, 3]  # F0, F1 on stage 0, F0 on stage 1
    assert seen["on"]["at"] == "2 of 12 units"
    assert seen["on"]["stored"] == ["stores 2", "stores 1", "stores 3", "stores 2"]  # gpipe starts F2, F1 at time 2
    assert (seen["on"]["button"], seen["playing"]["button"], seen["played"]["button"]) == ("play", "pause", "play")
    assert seen["played"]["at"] == "12 of 12 units"
    assert seen["played"]["drawn"] == [12, 12]
    assert seen["played"]["idle"] == ["25.0% idle", "25.0% idle"]
    assert "1f1b stores the activations of at most 2 " in seen["played"]["said"]
    assert "1f1b stores the activations of at most 3 " in seen["lock_step"]["said"]
    assert "3 is not a multiple of 2" in seen["refused"]["said"]
    assert seen["refused"]["microbatches"] == "2"


def test_the_layer_timeline_works_with_the_keyboard(seen):
    """Catches bars that need a mouse, red bars that differ from the file, and a switch that does nothing."""
    seen, cases = seen["layer"], layer_timeline.read()["cases"]
    seconds = lambda us: f"{us / 1e6:.3f} s"
    for state, name in (("start", "v5e_gather"), ("ring", "v5e_ring")):
        case = cases[name]
        assert seen[state]["step"] == seconds(case["step_us"])
        assert seen[state]["bars"] == sum(len(layer["events"]) for layer in case["layers"].values())
        waits = {name: us for name, us in case["causes_us"].items() if name not in ("matmuls", "other ops", "copies")}
        assert seen[state]["waiting"] == seconds(sum(waits.values()))
        back = case["layers"]["back"]
        red = sum(us for cause, us in back["own_us"].items() if cause in waits) / back["us"]
        assert seen[state]["red"] / (seen[state]["width"] - 8) == pytest.approx(red, abs=0.02)
        assert seconds(case["step_us"]) in seen[state]["own"]
    assert "on its" not in seen["start"]["said"]
    assert "all-gather over fsdp" in seen["moved"]["said"]
    assert "all_gather(" in seen["moved"]["said"]
    assert seen["wider"]["width"] > 1.8 * seen["ring"]["width"]


def test_every_picture_in_a_chapter_has_alternative_text(seen):
    """Catches a picture without alternative text, which blind readers need, or readers if it fails to load."""
    assert not {name: page["no_alt"] for name, page in pages(seen).items() if page["no_alt"]}


def test_every_chapter_links_to_its_notebook(seen):
    """Catches a page without its notebook, and a notebook that shows the tests of the solutions."""
    for path in notebooks.chapters():
        page = pages(seen)[f"chapters/{path.stem}.html"]
        assert page["notebook"] == f"../notebooks/{path.stem}.ipynb"
        assert page["copy_buttons"] > 3
        assert notebooks.HIDDEN not in str(notebook(build.HTML / "notebooks" / f"{path.stem}.ipynb"))


def test_a_notebook_shows_no_checker():
    """Catches a notebook that shows a right answer next to its question, in an editor that folds cells or in one that
    can't, and a notebook that runs other code than the site shows."""
    for path in notebooks.chapters():
        shown = [cell for cell in notebooks.read(path, for_readers=False).cells
                 if notebooks.HIDDEN not in cell.metadata.get("tags", ())]  # fmt: skip
        got = [cell for cell in notebooks.read(path).cells if cell.source != notebooks.first_cell()]
        for cell, own in zip(shown, got, strict=True):
            source = own.source
            called = re.search(r"folded\.code\('(\w+)', '(\w+)', (\d+)\)", source)
            if "hide-input" in cell.metadata.get("tags", ()):
                assert own.metadata["jupyter"]["source_hidden"] and own.metadata["cellView"] == "form"
                assert called or notebooks.folded_name(cell) != "the checker of the answer", source
                title, _, source = source.partition("\n")
                assert re.fullmatch(r"# @title (The|More) [a-z ]+", title), title
            if called:
                source = folded.sources(called[1], called[2])[int(called[3])]
            assert source == cell.source, path.stem
            if "hide-output" in cell.metadata.get("tags", ()):
                assert own.metadata["jupyter"]["outputs_hidden"]


def test_every_link_within_the_site_works(seen):
    """Catches a renamed page or heading."""
    found, lost = pages(seen), []
    for name, page in found.items():
        for link in page["links"]:
            target, heading = urldefrag(link)
            target = target.split("?")[0] or name
            if not (build.HTML / target).exists() or (
                heading and target in found and heading not in found[target]["ids"]
            ):
                lost.append((name, link))
    assert not lost


def test_redirects_lead_to_existing_pages():
    """Catches a redirect to a chapter that was renamed again, and an old page that the redirect does not overwrite,
    because a build keeps the pages of the previous build."""
    for name, text in build.forwards().items():
        old = build.HTML / name
        assert old.read_text(encoding="utf-8") == text, name
        [target] = re.findall(r'http-equiv="refresh" content="0; url=([^"]+)"', text)
        assert f'<a href="{target}">' in text, name
        assert (old.parent / target).stem in {path.stem for path in notebooks.chapters()}, name
        assert (old.parent / target).exists(), name


def test_a_notebook_runs_in_its_own_directory(tmp_path):
    """Catches a notebook that finds the project's modules only if Jupyter starts in a certain directory."""
    shortest = min(notebooks.chapters(), key=lambda path: len(path.read_text(encoding="utf-8")))
    [file] = notebooks.write([shortest.stem])
    notebooks.execute(notebook(file), file.parent)
    with pytest.raises(Exception, match="no checkout of Axis by Axis here"):
        notebooks.execute(notebook(file), tmp_path)


def test_a_notebook_clones_the_project_elsewhere(tmp_path, monkeypatch):
    """Catches a notebook that fails in an empty folder, such as on Colab, or after a restart of its kernel there, and a
    page without its link to Colab."""
    cell = tmp_path / "first_cell.py"
    cell.write_text(notebooks.FIND_PROJECT.format(repository=str(ROOT)) + "from chapters import lesson\nprint(lesson)")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PIP_NO_INDEX": "1"}
    for _ in range(2):
        done = subprocess.run([sys.executable, str(cell)], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "axis-by-axis" / "chapters" / "lesson.py") in done.stdout
    monkeypatch.setattr(address, "REPOSITORY", "")
    assert "colab" not in build.run_box("03_fsdp")
    monkeypatch.setattr(address, "REPOSITORY", "https://github.com/a/b")
    assert 'href="https://colab.research.google.com/github/a/b/blob/gh-pages/notebooks/03_fsdp.ipynb"' in build.run_box(
        "03_fsdp"
    )
    assert "'https://github.com/a/b'" in notebooks.first_cell()


def test_a_slow_or_failing_chapter_stops_the_build(tmp_path):
    """Catches a guide that is published with a slow or broken chapter, whether it ran in this build or an earlier
    one."""
    chapter, kept, messages = tmp_path / "07_long.py", tmp_path / "kept", []
    spin = "# %%\nimport time\nwhile time.process_time() < 3:\n    pass\ncheck_answer = lambda answer: 'Not yet.'\n"
    chapter.write_text(spin)
    for _ in range(2):  # executed, then loaded from the cache
        with pytest.raises(UserError, match=r"07_long took \d+ s of CPU time, more than the limit of 2"):
            notebooks.executed(chapter, kept, messages.append, longest_s=2)
        assert len(messages) == 1 and re.fullmatch(r"ran 07_long in \d+ s, \d+ s of CPU time", messages[0])
    assert notebooks.executed(chapter, kept, messages.append).cells
    chapter.write_text(spin + "assert 1 == 2\n")
    with pytest.raises(Exception, match="assert 1 == 2"):
        notebooks.executed(chapter, kept, messages.append)
    chapter.write_text('# %% tags=["remove-cell"]\nhint = "Not yet."\n# %%\ncheck_answer = lambda answer: hint\n')
    with pytest.raises(Exception, match="name 'hint' is not defined"):  # a reader's notebook has no such cell
        notebooks.executed(chapter, kept, messages.append)


def test_the_tests_of_a_chapter_are_not_shown():
    """Catches a page that shows the tests of the solutions, and so the solutions."""
    for path in notebooks.chapters():
        hidden = [cell for cell in notebooks.read(path, for_readers=False).cells
                  if notebooks.HIDDEN in cell.metadata.get("tags", ())]  # fmt: skip
        text = (build.HTML / "chapters" / f"{path.stem}.html").read_text(encoding="utf-8")
        words = re.sub(r"<[^>]+>", "", text)
        for cell in hidden:
            longest = max(cell.source.splitlines(), key=len)
            assert longest.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") not in words, path.stem


def test_folded_code_is_named():
    """Catches several equal bars in a row, which don't say which of them a reader can skip."""
    for page in (build.HTML / "chapters").glob("[0-9]*.html"):
        if page.name in {name.rpartition("/")[2] for name in build.forwards()}:
            continue
        text = page.read_text(encoding="utf-8")
        assert text.count("Show the imports") == 1, page.name
        assert "Show the code of the figure" in text and "Show code cell source" not in text, page.name
