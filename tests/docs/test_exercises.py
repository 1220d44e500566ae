"""Tests of the exercises that the site checks without JAX: replies, values, gradients and bytes are those of JAX."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from chapters import lesson
from docs.in_exercises import programs
from sharding import make_mesh

RUN = """
import json, sys
sys.path.insert(0, ".")
import environment
assert not {"jaxlib", "scipy"} & {*sys.modules}
text = sys.stdin.read()
exercises = environment.Exercises(text)
for name, one in exercises.by_name.items():
    names = exercises.names(name)
    exec(compile(one["cell"] + one["tests"], name, "exec"), names)
    assert exercises.check(name, one["cell"]) == "Nothing there yet: replace the dots with your answer.", name
print(*exercises.by_name, sep="\\n")
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The folder with the files that the page unpacks, and its exercises with their tests, as JSON."""
    folder, found = tmp_path_factory.mktemp("page"), programs.contents()
    for name, text in found["python"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder, json.dumps(found)


def test_the_checkers_reply_as_with_jax(page):
    """Catches a hint, a number of bytes or a gradient that differs from JAX's, by the tests that the chapter has."""
    folder, text = page
    done = subprocess.run([sys.executable, "-S", "-I", "-c", RUN], cwd=folder, input=text, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [f"{chapter} {number}" for chapter, numbers in programs.CHAPTERS.items() for number in numbers]
    assert done.stdout.splitlines()[-len(names) :] == names and len(names) == 26


def test_a_box_has_the_readers_function_and_no_checker():
    """Catches a box with the checker, whose code has a right answer, or without the function that a reader fills in."""
    for one in (one for chapter in programs.CHAPTERS for one in programs.exercises(chapter)):
        assert re.search(r" \.\.\.($|  # )", one.cell, re.MULTILINE), one.cell
        assert "lesson." not in one.cell and one.cell.splitlines()[-1].startswith("print(check_"), one.cell


@pytest.fixture(scope="module")
def emulated(page):
    """The emulation of JAX, with the real NumPy."""
    folder, _ = page
    (folder / "numpy.py").rename(folder / "numpy_of_the_page.py")
    sys.path.insert(0, str(folder))
    try:
        import environment
    finally:
        sys.path.remove(str(folder))
    (folder / "numpy_of_the_page.py").rename(folder / "numpy.py")
    return environment


# Functions of (jax, x_bD: this device's 4 of 16 rows, w_DF: equal everywhere) that return the number to differentiate
LOSSES = {
    "a partial loss": lambda j, x, w: ((x @ w) ** 2).sum() / 7,
    "psum": lambda j, x, w: j.lax.psum((x @ w).sum(), "fsdp") * x[0, 1],
    "psum of what is equal": lambda j, x, w: j.lax.psum((w**3).sum(), "fsdp"),
    "psum over two axes": lambda j, x, w: (
        j.lax.psum(j.lax.pcast(x @ w, "tensor", to="varying"), ("fsdp", "tensor")) ** 2
    ).sum(),
    "psum of a tuple": lambda j, x, w: sum(one.mean() for one in j.lax.psum((x @ w, x**2), "fsdp")),
    "pmean": lambda j, x, w: (j.lax.pmean(x @ w, "fsdp") ** 2).sum(),
    "all_gather": lambda j, x, w: (gather(j, x, 0)[::2] @ w).mean() * x[1, 1],
    "all_gather of columns": lambda j, x, w: (gather(j, x, 1) ** 3).sum(),
    "all_gather of what is equal": lambda j, x, w: (gather(j, w, 0) ** 3).sum(),
    "all_gather, invarying": lambda j, x, w: ((gather(j, x, 0, to="invarying") @ w) ** 2).sum(),
    "psum_scatter": lambda j, x, w: (j.lax.psum_scatter(x @ w, "fsdp", scatter_dimension=0, tiled=True) ** 2).sum(),
    "all_to_all": lambda j, x, w: (j.lax.all_to_all(x, "fsdp", 1, 0, tiled=True)[:, 0] ** 2 * w[0, 0]).sum(),
    "ppermute": lambda j, x, w: (j.lax.ppermute(x, "fsdp", [(0, 1), (1, 2), (2, 3)]) * x @ w).sum(),
    "pcast": lambda j, x, w: (j.lax.pcast(w, "fsdp", to="varying")[2:, 1:] ** 2).sum() * x[0, 0],
    "an index that differs": lambda j, x, w: (x[j.lax.axis_index("fsdp")] @ w).sum() + w[j.lax.axis_index("tensor"), 0],
    "a slice that differs": lambda j, x, w: (
        j.lax.dynamic_slice_in_dim(w, j.lax.axis_index("fsdp") * 2 - 3, 2, axis=0) ** 2
    ).sum(),
    "where": lambda j, x, w: j.numpy.where(x[:, :1] > w[0, 0], x @ w, -2.0 * w[0]).sum(),
    "functions": lambda j, x, w: (
        (j.numpy.exp(x[0] / 3) * j.numpy.tanh(x[1]) + j.numpy.sqrt(x[2] ** 2 + 1)).sum() + j.numpy.log(w**2 + 2).sum()
    ),
    "relu": lambda j, x, w: j.nn.relu(x @ w).sum() - abs(w).sum(),
    "gelu and silu": lambda j, x, w: (j.nn.gelu(x @ w) * j.nn.silu(-w[0, 0])).sum(),
    "a sum over two dims": lambda j, x, w: (x[None] * (w.T @ x.T)[:, :, None]).sum(axis=(0, -2))[3] * w.mean((0, 1)),
    "argmax": lambda j, x, w: (w[j.numpy.argmax(x, axis=1)[0]] ** 2).sum() * j.numpy.sign(x[0, 0]),
    "powers": lambda j, x, w: ((x**2 + 1) ** w[None, :, 0] / 2.0 ** w[None, :, 1]).mean(),
    "shapes": lambda j, x, w: (j.numpy.stack([*x], axis=1).reshape(2, -1) * 2 / (3 + w.T.reshape(-1).mean() ** 2)).sum(
        axis=1
    )[1],
    "chunks": lambda j, x, w: (
        (j.numpy.concatenate([w, x.T], axis=1) ** 2)[3].sum() * j.numpy.split(w, 4)[2].mean(axis=1)[0]
    ),
    "a dim that broadcasts": lambda j, x, w: (
        (x.sum(axis=0, keepdims=True) + x) * (5 - w[None, :, 0]) * w[None, :, 1] % 3
    ).sum(),
}
gather = lambda j, x, dim, **to: j.lax.all_gather(x, "fsdp", axis=dim, tiled=True, **to)
X, W = (np.random.default_rng(3).normal(size=size).astype(np.float32) for size in ((16, 8), (8, 3)))
MESH = "fsdp=4,tensor=2"


def results(j, name: str, mesh, spec, counted) -> tuple:
    """Return the loss of each device, the gradients of its mean over `tensor`, and the bytes that a device sends."""
    differs = lambda: (
        0.0 * j.lax.axis_index("tensor")
    )  # so that every loss has one type, whether or not it uses the axis

    def value(x, w):
        return LOSSES[name](j, x, w).reshape(1) + differs()

    def gradient(x, w):
        return j.grad(lambda x, w: j.lax.pmean(LOSSES[name](j, x, w) + differs(), "tensor"), (0, 1))(x, w)

    specs = spec("fsdp"), spec()
    run = lambda function, out: j.jit(j.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))
    forward = run(value, spec(("fsdp", "tensor")))
    return forward(X, W), run(gradient, specs)(X, W), counted(forward, mesh, X, W).total.wire_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_values_gradients_and_bytes_are_those_of_jax(name, emulated):
    """Catches a collective, or the gradient of an operation, that differs from JAX's."""
    count = lambda function, mesh, *args: emulated.program.counted(function, *args)
    own = results(emulated.jax, name, emulated.make_mesh(MESH), emulated.program.PartitionSpec, count)
    value, gradients, sent = results(jax, name, make_mesh(MESH), P, lesson.compiled)
    np.testing.assert_allclose(own[0] + np.zeros(8), value, rtol=2e-5)
    for found, want in zip(own[1], gradients, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    assert own[2] == sent


REFUSED = {
    "a psum is missing": (lambda j, x: x.sum().reshape(1), (), ValueError, "may differ between these devices"),
    "no such axis": (lambda j, x: j.lax.psum(x, "rows"), ("fsdp",), NameError, "unbound axis name: rows"),
    "a condition on an array": (lambda j, x: x if x[0, 0] > 0 else -x, ("fsdp",), TypeError, "a Python bool: it may"),
    "shapes": (lambda j, x: x @ x, ("fsdp",), TypeError, "got (4, 8) and (4, 8)"),
    "another function": (lambda j, x: j.numpy.fft(x), ("fsdp",), AttributeError, "without jax.numpy.fft; use the note"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_as_by_jax(name, emulated):
    """Catches a program that runs here and not with JAX."""
    function, spec, kind, why = REFUSED[name]
    spec_of, mesh = emulated.program.PartitionSpec, emulated.make_mesh(MESH)
    run = emulated.jax.shard_map(lambda x: function(emulated.jax, x), mesh=mesh, in_specs=spec_of("fsdp"),
                                 out_specs=spec_of(*spec))  # fmt: skip
    with pytest.raises(kind) as error:
        run(X)
    assert why in str(error.value)
    program = jax.shard_map(lambda x: function(jax, x), mesh=make_mesh(MESH), in_specs=P("fsdp"), out_specs=P(*spec))
    with pytest.raises((ValueError, NameError, TypeError, AssertionError)):
        program(jnp.asarray(X))


def test_an_error_in_the_readers_code_is_one_line(emulated, page):
    """Catches a traceback, an error without its line, and a cell that sees the names of another exercise."""
    exercises = emulated.Exercises(page[1])
    name = "01_sharding 1"
    assert exercises.check(name, "def f(:") == "SyntaxError in line 1: invalid syntax"
    assert exercises.check(name, "print(1)\n\nx = 1 / 0") == "1\nZeroDivisionError in line 3: division by zero"
    line, note = exercises.check(name, "check_ring").split("\n")
    assert line == "NameError in line 1: name 'check_ring' is not defined" and note == emulated.OTHER_NAMES
    assert exercises.check(name, "x = 3") == emulated.NOTHING_PRINTED
    right = 'print(check_to_columns(lambda x: jax.lax.all_to_all(x, "fsdp", 1, 0, tiled=True)))'
    assert exercises.check(name, right) == "Right on 4 and 8 devices; on 8, a device sends 1,344 bytes."
