"""Tests of the planner without JAX and NumPy, as it runs in the site's page; tests/site runs it in the browser."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest

from config import preset, replace
from docs import in_browser, planner_widget
from docs.notebooks import ROOT
from plan import planner
from plan.count import memory
from utils import UserError

PIN = {"remat": "full", "gather": "layer", "tensor_exchange": "ring", "context_attention": "gather"}
ASK = """
import json, sys
sys.path.insert(0, ".")
import page
assert not {"jaxlib", "scipy"} & {*sys.modules}
print(json.dumps([json.loads(page.answer(json.dumps(one))) for one in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that answers questions in a Python without any package."""
    folder = tmp_path_factory.mktemp("page")
    settings = in_browser.SETTINGS | {name: (value,) for name, value in PIN.items() if name in in_browser.SETTINGS}
    rows = in_browser.layers([preset("laptop").at_work], settings)
    for name, content in in_browser.files(rows).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    def answers(*questions: dict) -> list[dict]:
        command = [sys.executable, "-S", "-I", "-c", ASK]
        done = subprocess.run(command, cwd=folder, input=json.dumps(questions), text=True, capture_output=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return answers


def different(here, there, name: str = "plan") -> list[str]:
    """List where two plans differ, by more than rounding."""
    if isinstance(here, dict):
        return [one for key in here for one in different(here[key], there[key], f"{name}.{key}")]
    if isinstance(here, list):
        return [one for i, pair in enumerate(zip(here, there, strict=True)) for one in different(*pair, f"{name}[{i}]")]
    same = there == pytest.approx(here, rel=1e-9, abs=1e-12) if isinstance(here, float) else there == here
    return [] if same else [f"{name}: {here} here, {there} in the page"]


def test_the_planner_needs_neither_jax_nor_numpy(ask):
    """Catches an import or a call that the stand-ins lack, and a stand-in with other results than NumPy's."""
    points = [("v4:4x4x4", "stage=2,fsdp=8,tensor=4"), ("v5e:4x8", "fsdp=16,context=2"), ("tpu7x:2x2x4", "fsdp=32"),
              ("2*v5p:4x4x2", "data=2,expert=8,tensor=4"), ("16*h100", "fsdp=32,tensor=4")]  # fmt: skip
    questions = [{"preset": "laptop", "topology": topology, "mesh": mesh, "batch_size": "128", "seq_len": "1024",
                  "schedule": "1f1b", **PIN} for topology, mesh in points]  # fmt: skip
    work = {f"work.{name}": value for name, value in PIN.items()} | {"work.schedule": "1f1b"}
    for (topology, mesh), there in zip(points, ask(*questions), strict=True):
        cfg = replace(preset("laptop"), mesh=mesh, **work, **{"data.batch_size": 128, "data.seq_len": 1024})
        here = json.loads(json.dumps(planner.plan(cfg, topology).to_json()))
        assert not different(here, there)


def test_an_error_is_the_planners_line(ask):
    """Catches a traceback in the page, and a layer that was not traced reported as something else."""
    good = {"preset": "laptop", "topology": "v4:2x2x2", "mesh": "fsdp=8", **PIN}
    broken, odd, other, priced = ask(good | {"topology": "v9:4"}, good | {"mesh": "fsdp=3"},
                                     good | {"remat": "none"}, good | {"price": "2"})  # fmt: skip
    for there, topology, mesh in ((broken, "v9:4", "fsdp=8"), (odd, "v4:2x2x2", "fsdp=3")):
        with pytest.raises(UserError) as error:
            planner.plan(replace(preset("laptop"), mesh=mesh), topology)
        assert there == {"error": str(error.value)}
    assert other == {"error": "this page has no trace of a layer of this kind; use `python -m plan` on a computer, "
                              "with JAX"}  # fmt: skip
    assert priced == {"error": "price has an effect only with tokens; fill in tokens, such as 15e12"}


def test_every_row_of_the_memory_table_is_explained():
    """Catches a part of the memory that the page or docs/planner.md does not explain, or explains differently."""
    local = {"mesh": "data=2,fsdp=2", "optim.outer": "every=10"}
    parts = planner.plan(replace(preset("laptop"), **local), "v4:2x2x1").memory_bytes
    assert [*memory.MEANS] == [*parts] and planner_widget.page_data()["means"] == memory.MEANS
    text = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    assert "\n".join(f"| `{part}` | {what} |" for part, what in memory.MEANS.items()) in text


def test_the_stand_in_for_numpy():
    """Catches a function with other results than NumPy's: views, index arrays, axes, and sums of repeated entries."""
    spec = spec_from_file_location("stand_in", ROOT / "docs/in_page/numpy.py")
    spec.loader.exec_module(small := module_from_spec(spec))

    def results(np):
        x = np.arange(2 * 3 * 4).reshape(2, 3, 4)
        rows, columns = np.array([1, 0, 1]), np.array([2, 0, 2])
        load = np.zeros((3, 4))
        np.add.at(load, (columns, rows), np.array([1.5, 2.0, 4.0]))
        load[1][:] = 7.0
        load[load > 5] = -1.0
        a = np.array([[3, 1, 3], [0, 2, 2]])
        yield from (x[1, :, ::2], x[rows, :, columns], x[..., 1], x[:, None, 2], x[:, rows, columns], load)
        yield from (
            np.moveaxis(x, (0, 2), (-1, -2)),
            x.transpose(2, 0, 1),
            np.roll(x, -1, axis=1),
            np.roll(a, 1, axis=1),
        )
        yield from (
            np.ptp(a, axis=1),
            np.sort(a),
            np.diff(a, axis=1),
            a.cumsum(axis=1),
            x.sum(-1),
            x.max(1),
            a % 2,
            -a // 2,
        )
        yield from np.unique(np.array([[1, 2], [0, 5], [1, 2]]), axis=0, return_counts=True)
        yield from np.unique(np.array([[1, 2], [0, 5], [1, 2]]), axis=0, return_index=True)
        yield from (np.where(a > 1, a, 0), np.minimum(a, 2))
        yield np.take_along_axis(x, rows[None, :, None] * a[:, :, None] // 3, axis=1)
        yield from (np.lexsort([a, a % 2], axis=-1), np.ravel_multi_index((rows, columns), (2, 3)), x @ [1, 2, 0, 1])
        yield from (np.broadcast_to(rows, (2, 3)), np.concatenate([a, a]), np.sign(a - 1))
        yield from (np.abs(a - 2), np.argsort([3, 1, 2]))

    for i, (one, other) in enumerate(zip(results(np), results(small), strict=True)):
        assert np.array_equal(one, other.tolist()), (i, one, other)


def test_a_damaged_download_is_not_unpacked(tmp_path, monkeypatch):
    """Catches a site with another Pyodide than the one that was tested, and a folder that is half written."""
    monkeypatch.setattr(in_browser.utils, "cache_directory", lambda: str(tmp_path))
    (tmp_path / f"pyodide-{in_browser.VERSION}.tgz").write_bytes(b"half of a file")
    with pytest.raises(UserError, match=r"pyodide-.*\.tgz is not the package that npm published .*; delete it"):
        in_browser.write_pyodide(tmp_path / "pyodide")
    assert not [*(tmp_path / "pyodide").glob("*")]
