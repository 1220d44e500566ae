"""Tests of the repository: import order, lock files, and strings that must not appear in any file."""

import ast
import functools
import graphlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from config import AXES

ROOT = Path(__file__).resolve().parent.parent

# Rooms: our files at the root, and our packages. Each has its largest number of lines, and the rooms that it may
# import. A commit that raises a number of lines says why. None: it may import anything.
ROOMS = {
    "utils": (207, ""),
    "progress": (75, "utils"),
    "devices": (175, "utils"),
    "config": (1664, "utils devices"),
    "launch": (2100, ""),
    "compile": (1266, "utils devices"),
    "sharding": (483, "utils config compile"),
    "kernels": (1569, "sharding"),
    "overlap": (1142, "config compile sharding kernels"),
    "rotary": (121, "config"),
    "model": (839, "utils config sharding kernels overlap rotary"),
    "encoder_decoder": (245, "config sharding kernels overlap model"),
    "architectures": (85, "config model encoder_decoder"),
    "parameters": (135, "config compile sharding model architectures"),
    "pipeline": (1742, "utils config compile sharding parameters overlap model architectures"),
    "muon": (212, "config sharding"),
    "local_steps": (220, "utils config compile sharding"),
    "optimizer": (521, "utils config compile sharding parameters muon local_steps architectures pipeline"),
    "data.reading": (780, "utils devices config"),
    "dataset": (600, "utils devices config data.reading"),
    "data": (2735, "utils progress devices config dataset data.reading"),
    "train.hosts": (740, "utils devices config"),
    "train": (2495, "utils progress devices config sharding optimizer dataset data.reading train.hosts"),
    "weights": (2089, "utils progress config sharding architectures parameters data train"),
    "generate": (2059, "utils progress devices config compile sharding parameters kernels overlap model "
                       "encoder_decoder architectures pipeline data train weights"),
    "evaluate": (1180, "utils progress devices config compile sharding overlap model architectures pipeline dataset "
                       "data.reading data train.hosts train weights generate"),
    "serve": (1160, "utils devices config generate"),
    "plan.chips": (975, "utils config sharding"),
    "plan.trace": (978, "utils devices config compile sharding architectures pipeline optimizer plan.chips"),
    "plan.count": (1678, "utils config sharding kernels overlap model encoder_decoder architectures parameters muon "
                         "pipeline optimizer generate plan.chips plan.trace"),
    "plan.simulate": (721, "utils config compile pipeline plan.chips plan.count"),
    "plan.time": (919, "utils config sharding plan.chips plan.trace plan.count plan.simulate"),
    "plan.answer": (2516, "utils config compile sharding architectures parameters pipeline local_steps generate "
                          "plan.chips plan.trace plan.count plan.time"),
    "plan": (1542, "utils progress devices config compile sharding weights plan.chips plan.trace plan.count "
                   "plan.simulate plan.time plan.answer"),
    "startup": (255, "utils devices config compile sharding pipeline optimizer dataset data.reading data plan.chips "
                      "plan.answer plan train.hosts train generate weights"),
    "main": (250, None),
}  # fmt: skip
# The files of a package, in order: each may import those before it.
FILES = {
    "config": "fields mesh needs settings presets flags",
    "launch": "supervisor machine agent hosts launcher panes __main__",
    "compile": "hlo ledger options ordered",
    "kernels": "blocks grouped_gpu grouped attention_gpu attention masked",
    "overlap": "rings positions layers remat context experts gradients weights fusion",
    "pipeline": "schedules check draw fit documents ticks step __main__",
    "data.reading": "bucket manifests packing order objectives features examples",
    "data": "files hub sources hf_json sp_model tokenizers shards units engine prepare check train_tokenizer tasks",
    "plan.chips": "units constants links hardware hiding",
    "plan.trace": "compiled rows program user_file",
    "plan.count": "weights traced_layer networks matrices costs memory step",
    "plan.simulate": "moved live simulator replayed",
    "plan.time": "offload roofline simulated terms measured fit tiers plan",
    "plan.answer": "auto planning own_steps inference at_scale show why budget explain front serving parameter_list",
    "plan": "without_jax planner traced replay profile verify __main__",
    "train.hosts": "pace board agreement watchdog processes",
    "train": "storage steps checkpoint guard tracking report directory interruptions progress selfcheck recorder",
    "weights": "folders families layouts hf_config published card convert init_from __main__",
    "generate": "quantised cache request sampling engine beam speculative runs texts __main__",
    "evaluate": "answers scoring answering harness perplexity metrics task validation follow __main__",
    "serve": "metrics template worker protocol app lifetime __main__",
    "startup": "start preflight",
}
AROUND = {"tests", "chapters", "bench", "docs"}  # what uses the rooms, and is not imported by them
NOT_OURS = {".git", ".venv", "runs", "tokens", "notebooks", "docs/_build"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]


def files(*patterns):
    """Return the project's files that match a pattern, without top-level paths that git ignores."""
    found = {path for pattern in patterns for path in ROOT.rglob(pattern) if path.is_file()}
    tops = lambda path: {path.relative_to(ROOT).parts[0], "/".join(path.relative_to(ROOT).parts[:2])}
    return sorted(path for path in found if not tops(path) & NOT_OURS)


def shell_files():
    """Every file that ends in .sh or .sbatch, or begins as a shell script."""
    shebang = re.compile(rb"#!.*\b(ba|da)?sh\b")
    plain = [path for path in files("*") if not path.suffix and shebang.match(path.read_bytes()[:80])]
    return sorted({*files("*.sh", "*.sbatch"), *plain})


@functools.cache
def rooms():
    """Return the Python files of each room, by its name: a file at the root, or a package such as `data.reading`."""
    packages = [path.parent for depth in ("*", "*/*") for path in ROOT.glob(f"{depth}/__init__.py")]
    names = {".".join(folder.relative_to(ROOT).parts): sorted(folder.glob("*.py")) for folder in packages}
    around = {name for name in names if name.split(".")[0] in AROUND}
    return {path.stem: [path] for path in ROOT.glob("*.py")} | {name: names[name] for name in names.keys() - around}


def room(name):
    """Return the room of an imported name: `data.reading` for data.reading.order.shuffle; None if it is not ours."""
    parts = name.split(".")
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in ROOMS), None)


def imported_rooms(name):
    """Return the other rooms that a room imports."""
    return {room(found) for path in rooms()[name] for found in imported(path)} - {name, None}


def imported(path):
    """Return the imports of a file, including those in functions: `from a.b import c` gives a.b.c."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pins(path):
    """Map each package of a lock to its pinned lines, without hashes: {jax: {"jax==0.10.2 ; python..."}}."""
    found = {}
    for line in requirements(path):
        pin = line.split(" --hash=")[0].strip()
        found.setdefault(pin.split("==")[0], set()).add(pin)
    return found


def requirements(path):
    """The requirements of a lock, one string each, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def package(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


LOCKS = files("requirements.txt", "requirements/*.txt")


def test_tests_see_eight_devices_and_no_network():
    """Catches tests that pass because every mesh has one device, or because a host on the network answered."""
    assert jax.device_count() == 8
    with pytest.raises(OSError, match=r"tests may not use the network, but something connects to 192\.0\.2\.1:80"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)  # an address reserved for documentation


def test_shapes_are_never_stretched_silently():
    """Catches tests in which [B, T] + [T] is accepted, and a missing dimension goes unseen."""
    with pytest.raises(ValueError, match="jax_numpy_rank_promotion"):
        jax.numpy.ones((2, 3)) + jax.numpy.ones(3)


def test_every_file_has_a_room():
    """Catches a new file or package without a place in the import order, and a row for a removed one."""
    assert rooms().keys() == ROOMS.keys()
    for package, order in FILES.items():
        assert {path.stem for path in rooms()[package]} == {"__init__", *order.split()}, package
    assert {path.parent for paths in rooms().values() for path in paths} == {
        ROOT, *(ROOT / package.replace(".", "/") for package in FILES)}  # fmt: skip


@pytest.mark.parametrize("name", ROOMS)
def test_imports_go_one_way(name):
    """Catches a lower room that imports a higher one."""
    allowed = {*ROOMS} if ROOMS[name][1] is None else {*ROOMS[name][1].split()}
    assert imported_rooms(name) <= allowed, f"{name} may not import {imported_rooms(name) - allowed}"


@pytest.mark.parametrize("name", FILES)
def test_imports_in_a_room_go_one_way(name):
    """Catches two files of a package that import each other."""
    order = FILES[name].split()
    for place, file in enumerate(order):
        found = imported(ROOT / name.replace(".", "/") / f"{file}.py")
        names = {one.removeprefix(f"{name}.").split(".")[0] for one in found if one.startswith(f"{name}.")}
        assert names & {*order} <= {*order[:place]}, f"{name}/{file}.py imports {names - {*order[:place]}}"


def test_rooms_form_no_circle():
    """Catches two rooms that import each other, directly or through others, even if the table allows it."""
    graphlib.TopologicalSorter({name: imported_rooms(name) for name in ROOMS}).prepare()
    graphlib.TopologicalSorter({name: (allowed or "").split() for name, (_, allowed) in ROOMS.items()}).prepare()


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_stays_within_its_lines(name):
    """Catches a room that grows although nobody decided that it should."""
    lines = sum(len(path.read_text().splitlines()) for path in rooms()[name])
    assert lines <= ROOMS[name][0], f"{name} has {lines} lines, and its limit is {ROOMS[name][0]}"


@pytest.mark.parametrize("name", FILES)
def test_a_room_says_what_it_is_for(name):
    """Catches a package docstring without its purpose, the file to open first, or its public names."""
    file, ours = f"{name.replace('.', '/')}/__init__.py", {*FILES[name].split()}
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    first = re.search(r"\n\nOpen `(\w+)\.py`", text)
    assert first, f"{file} does not say which file to open first"
    assert first[1] in ours
    assert "\n\nFrom outside: " in text, f"{file} does not say what may be imported from outside"
    named = set(re.findall(r"`(\w+)\.py`", text)) - ({"__main__", *ROOMS} - ours)
    assert named == ours - {"__main__"}, f"{file} names {named}"


def test_entering_a_room_loads_nothing():
    """Catches an `__init__.py` that imports JAX or its own files, which would slow down `--help`."""
    rooms = set(FILES) - {"config"}  # whose names are imported from the room itself; it loads no JAX
    code = f"import sys; before = set(sys.modules); import {', '.join(rooms)}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == rooms
    code = "import sys, config; print(sorted({'jax', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_errors_and_devices_are_imported_quickly():
    """Catches a slow `--help` or first error, because of an import of JAX or NumPy."""
    code = "import sys, devices, utils; print(*{'jax', 'numpy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


MOST_LINES = {"model.py": 839, "main.py": 250, "README.md": 150}  # of a file; of any other Python file 600


def test_files_and_functions_are_short():
    """Catches files and functions that have grown too long. In a chapter, only the visible code counts; tests/chapters
    limits its prose."""
    long = {}
    for path in files("*.py", "README.md"):
        name, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
        if re.match(r"chapters/\d", name):
            cells = [cell.partition("\n") for cell in re.split(r"(?m)^# %%", path.read_text())]
            seen = "".join(code for head, _, code in cells if "remove-cell" not in head)
            lines = [line for line in seen.splitlines() if line and not line.startswith("#")]
        if len(lines) > MOST_LINES.get(name, 600):
            long[name] = len(lines)
        for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60:
                long[f"{name}: {node.name}"] = node.end_lineno - node.lineno + 1
    assert not long


@pytest.mark.parametrize(
    "target, there",
    [("train", []), ("extra-ray", ["installed"]), ("extra-browser", ["installed", "extra-site"])],
)
def test_make_does_not_follow_a_linked_venv(target, there, tmp_path):
    """Catches an install through a .venv that is a link: it would empty or change the one of another checkout."""
    kept = tmp_path / "other/.venv"
    kept.mkdir(parents=True)
    checkout = shutil.copytree(ROOT / "requirements", tmp_path / "here/requirements").parent
    shutil.copytree(ROOT / "docs/browser", checkout / "docs/browser")
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, checkout)
    for name in there:  # newer than its lock: nothing is to be done for it
        (kept / name).touch()
    (kept / "precious").touch()
    (checkout / ".venv").symlink_to(kept)
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # these tests may be run by make
    done = subprocess.run(["make", target], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    told, made = done.stderr.splitlines()
    assert told == (f"error: .venv is a link to {kept}, and installing would change the packages there; "
                    "remove the link (rm .venv), and make installs its own .venv")  # fmt: skip
    assert made.startswith("make: ***") and not done.stdout
    assert {path.name for path in kept.iterdir()} == {*there, "precious"}


PYTHON = """#!/usr/bin/env bash
# A Python whose pip waits between its lines until the test creates the next file.
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin .venv/lib/python3/site-packages/one.dist-info; cp "$0" .venv/bin/python ;;
    *"-m pip"*)
        echo "Collecting absl-py==2.5.1 (from -r requirements.txt (line 1))"; until [ -e one ]; do sleep 0.1; done
        [ ! -e broken ] || { echo "  Downloading x"; echo "ERROR: no such hash"; echo "  expected 1"; exit 1; }
        echo "Installing collected packages: absl-py"; until [ -e two ]; do sleep 0.1; done ;;
esac
"""


@pytest.mark.parametrize("broken", [False, True])
def test_an_install_shows_its_size_and_progress(broken, tmp_path):
    """Catches three silent minutes in which a newcomer cannot tell an install from a hang, a wrong size, a failure that
    make takes for success or that prints no reason, and a watching process that outlives the install."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3.11").write_text(PYTHON)
    (tmp_path / "bin/python3.11").chmod(0o755)
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    env["PATH"] = f"{tmp_path}/bin:{env['PATH']}"
    make = subprocess.Popen(["make", ".venv/installed", "PROGRESS_S=0.2"], cwd=tmp_path, env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    count = len(pins(ROOT / "requirements.txt"))
    assert f"Installing the {count} packages of requirements.txt into .venv" in make.stdout.readline()
    assert f"  1 of {count} packages downloaded\n" in iter(make.stderr.readline, "")
    (tmp_path / "broken").touch() if broken else None
    (tmp_path / "one").touch()
    if not broken:
        assert any(
            re.fullmatch(r"  1 packages and \d+ MB are in .venv\n", line) for line in iter(make.stderr.readline, "")
        )
        (tmp_path / "two").touch()
    _, said = make.communicate(timeout=60)  # ends only when the watching process has closed standard error
    assert (make.returncode, (tmp_path / ".venv/installed").exists()) == ((2, False) if broken else (0, True))
    assert "  Downloading x" not in said and ("ERROR: no such hash\n  expected 1\n" in said) == broken


def test_the_size_of_an_install_is_the_measured_one():
    """Catches a size in the Makefile that is out of date."""
    found = [next(iter(importlib.metadata.distributions(name=name)), None) for name in pins(ROOT / "requirements.txt")]
    paths = [one.locate_file(file) for one in found if one for file in one.files]
    measured_mb = sum(os.path.getsize(path) for path in paths if os.path.exists(path)) / 1e6
    typed_mb = int(re.search(r"(?m)^PACKAGES_MB := (\d+)$", (ROOT / "Makefile").read_text())[1])
    assert typed_mb == pytest.approx(measured_mb, rel=0.1)


def test_the_model_does_not_read_execution_settings():
    """Catches model.py code that depends on execution settings, and lines that are too long."""
    text = (ROOT / "model.py").read_text()
    names = "remat|gather|tensor_exchange|context_attention|expert_exchange|loss_chunk"
    assert not re.search(rf"\bwork\.|\b({names})\s*[!=]=", text)
    assert max(map(len, text.splitlines())) <= 110


def test_every_extra_has_a_lock():
    """Catches an extra without a lock, and a lock whose extra was removed."""
    assert {path.stem for path in LOCKS} == {"requirements", *EXTRAS}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_with_a_hash(path):
    """Catches a requirement added by hand: pip would refuse the whole file on a new machine."""
    assert requirements(path), f"{path.name} is empty"
    for line in requirements(path):
        assert re.fullmatch(r"[\w.-]+==\S+( ; .+?)?( +--hash=sha256:[0-9a-f]{64})+ *", line), line


def test_the_locks_hold_what_pyproject_lists():
    """Catches a dependency added without `make lock`."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {package(name) for name in listed} <= set(pins(ROOT / "requirements.txt"))
    for extra, names in EXTRAS.items():
        assert {package(name) for name in names} <= set(pins(ROOT / f"requirements/{extra}.txt"))


def test_the_harness_can_query_a_server():
    """Catches an extra without a package that `lm_eval --model local-completions` on docs/evaluate.md looks for: the
    harness then refuses to start. It does not depend on them itself (lm_eval/models/api_models.py, `TemplateAPI`)."""
    assert {"aiohttp", "requests", "tenacity", "tqdm"} <= set(pins(ROOT / "requirements/evaluate.txt"))


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_fits_on_top_of_the_base(extra):
    """Catches an extra whose installation would change a package of the base."""
    base, ours = pins(ROOT / "requirements.txt"), pins(ROOT / f"requirements/{extra}.txt")
    for name in set(base) & set(ours):
        assert {pin.split(" ;")[0] for pin in ours[name]} <= {pin.split(" ;")[0] for pin in base[name]}


def test_the_base_holds_no_extra():
    """Catches a base install that grows by gigabytes, or by libtpu, which makes plain CPU runs print alarming lines."""
    heavy = re.compile(r"libtpu|torch|transformers|ray|sphinx.*|myst.*|jupytext|ipykernel|nvidia.*|jax-cuda.*|uv")
    assert not [name for name in pins(ROOT / "requirements.txt") if heavy.fullmatch(name)]


def test_no_address_in_locks_makefile_and_scripts():
    """Catches a package mirror, host or bucket of one machine that would travel with the repository."""
    for path in [*LOCKS, ROOT / "pyproject.toml", ROOT / "Makefile", *shell_files()]:
        assert not re.search(r"\w+://\w[^\s\"']*", path.read_text()), path.name


def test_the_check_of_varying_axes_is_never_switched_off():
    """Catches the switch that hides a missing psum (STYLE 2)."""
    off = re.compile(r"check_(vma|rep)\s*=\s*False")
    assert not [path.name for path in files("*.py", "*.md") if off.search(path.read_text())]


PRIVATE_JAX = {"processes.py"}  # the key-value store of jax.distributed has no public name


def test_no_private_or_deprecated_jax():
    """Catches calls that the next version of JAX removes."""
    gone = re.compile(
        r"jax\._src|jax\s+import\s+_src|jax\.experimental\.(shard_map|maps|pjit)|experimental\s+import\s+(shard_map|pjit)"
        r"|jax\.pmap|\bpvary\(|PRNGKey\(|jax\.tree_(map|leaves|flatten)\b|jax\.tree_util\.tree_(map|leaves)\b"
    )
    assert {path.name for path in files("*.py") if gone.search(path.read_text())} == PRIVATE_JAX


def test_readme_shows_a_command_by_line_15():
    """Catches a README without an early command to start."""
    readme = ROOT / "README.md"
    assert readme.exists(), "there is no README.md"
    lines = readme.read_text().splitlines()
    fences = [number for number, line in enumerate(lines, start=1) if line.startswith("```")]
    assert fences, "README.md shows no command (a block between ``` lines)"
    assert fences[0] < 15, f"the first command of README.md stands on line {fences[0] + 1}"


def test_there_are_shell_files():
    """Catches a search that finds no files, so that nothing is checked."""
    assert ROOT / ".ci" / "run" in shell_files()


@pytest.mark.parametrize("path", shell_files(), ids=lambda path: path.name)
def test_a_shell_file_is_clean(path):
    """Catches unquoted words, unset variables, and failures that a script ignores."""
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "shellcheck is missing beside Python: run make test"
    done = subprocess.run([shellcheck, "--external-sources", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "\nset -euo pipefail\n" in path.read_text(), "without `set -euo pipefail` (STYLE 15)"


def test_readme_shows_every_file_and_folder():
    """Catches a new file or folder at the root that nobody finds, and one that no longer exists."""
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"## Where the code is\n\n```text\n(.*?)```", text, re.DOTALL)[1]
    named = {name for line in tree.splitlines() for name in re.split(r"  +", line)[0].split(", ")}
    tracked = {path.relative_to(ROOT).parts for path in files("*.py", "*.sh")}
    expected = {parts[0] + "/" * (len(parts) > 1) for parts in tracked}
    assert named == expected - {".ci/"}


def test_readme_names_the_code_of_each_axis():
    """Catches a function that was renamed, and an axis without code."""
    rows = re.findall(r"(?m)^\| `(\w+)`.* \| `([\w/.]+)`: ([^|]+) \|$", (ROOT / "README.md").read_text())
    assert [axis for axis, *_ in rows] == [*AXES]
    for _, file, functions in rows:
        names = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert set(re.findall(r"`(\w+)`", functions)) <= names, file


def test_the_engine_imports_no_tool():
    """Catches a training step that needs the planner or a tool: README says that it does not."""
    above = [*ROOMS][[*ROOMS].index("dataset") :]
    for name in [*ROOMS][: [*ROOMS].index("optimizer") + 1]:
        assert not imported_rooms(name) & {*above, "data.reading"}, name
