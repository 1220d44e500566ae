"""Code that all chapters use: predictions, checks of answers, and figures. Readers never need to open it."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import linecache
import re
import sys
import textwrap

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from compile import ledger
from sharding import CONTEXT, DATA, EXPERT, FSDP, STAGE, TENSOR, as_tuple
from utils import UserError

# Each mesh axis has the same color in the whole guide; NEUTRAL is for everything else. In dark mode the site inverts
# figures and restores the hues, and these colors stay distinct.
COLORS = {DATA: "#8c6d4f", STAGE: "#e08a1e", FSDP: "#3f74b5", EXPERT: "#9a5fb0", CONTEXT: "#3f9a4d", TENSOR: "#cf4446"}
NEUTRAL = "#7d7d7d"
DEVICES = matplotlib.colormaps["tab10"].colors  # colors of devices 0, 1, ..

plt.rcParams.update({
    "figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 10,
    "figure.facecolor": "none", "axes.facecolor": "none",  # the page, light or dark, is the background
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11, "axes.titlelocation": "left",
    "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "axis by axis",
})  # fmt: skip
if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():  # in a notebook, SVG stays sharp on a phone
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats("svg")
else:
    matplotlib.use("Agg")


# Predictions ----------------------------------------------------------------------------------------------------------


def predicted(what: str, prediction: float | None, counted: float, unit: str = "", within: float = 0.005) -> None:
    """Print a counted value, and compare the reader's prediction with it, if there is one.

    On the site the output is folded until the reader types a number or opens it (docs/_static/site.js).

    within  largest relative error at which a prediction counts as right
    """
    number = lambda x: f"{x:,}" if isinstance(x, int) or x == int(x) else f"{x:,.4g}"
    text = f"{what}: {number(counted)} {unit}".rstrip()
    if prediction is None or prediction is ...:
        print(f"{text}.")
    elif not isinstance(prediction, int | float):
        print(f"{text}. (A prediction must be a number; yours is {prediction!r}.)")
    elif abs(prediction - counted) <= within * abs(counted):
        print(f"{text}, as you predicted" + (f", within {within:.0%}." if within > 0.005 else "."))
    else:
        times = f", {prediction / counted:.3g} times as much" if counted else ""
        print(f"{text}. You predicted {number(prediction)}{times}.")


# Checkers -------------------------------------------------------------------------------------------------------------


def same(a, b, share: float = 1e-4) -> bool:
    """Return whether two numbers, arrays or trees agree within `share` times the largest entry of each array in b."""
    a, b = ([np.asarray(x, dtype=object if x is None else None) for x in jax.tree.leaves(t)] for t in (a, b))
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    if any(x.dtype.kind not in "biufc" for x in (*a, *b)):
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    close = lambda x, y: np.all(np.abs(x - y) <= share * max(np.abs(y).max(initial=0), 1e-30))
    return all(close(np.float64(x), np.float64(y)) for x, y in zip(a, b, strict=True))


NOTHING = "Nothing there yet: replace the dots with your answer."


class Unanswered(Exception):
    """Raised if the reader's function still returns `...`."""


def answered(function):
    """Wrap a reader's function so that it raises Unanswered instead of returning None or `...`.

    `diagnose` reports Unanswered as NOTHING, so a check may use the answer inside a `shard_map` or in arithmetic without
    testing it first.
    """
    if function is None or function is ...:
        raise Unanswered
    if not callable(function):
        raise TypeError(f"expected a function, but this is {brief(function)}")

    @functools.wraps(function)
    def call(*args, **more):
        result = function(*args, **more)
        if any(x is None or x is ... for x in jax.tree.leaves(result, is_leaf=lambda x: x is None)):
            raise Unanswered
        return result

    return call


def diagnose(answer, cases, right, mistakes: list[tuple], done: str, share: float = 1e-4, run=None) -> str:
    """Check a reader's function on every case. Returns one line: `done`, or a hint that says what is wrong.

    cases     tuples of arguments, chosen so that no mistake gives the right result in all of them
    right     function with the same arguments that returns the right result
    mistakes  pairs (function with the same arguments, hint). If the answer's results equal those of such a function in
              all cases, its hint is returned.
    run       turns the answer, and the function of each mistake, into a function of a case, for example one that runs
              it on a mesh; by default the case's arguments are those of the answer
    """
    if answer is None or answer is ...:
        return NOTHING
    function = answer if callable(answer) else lambda *_: answer
    if run:
        function = run(lambda *args, **more: answered(answer)(*args, **more))
    found = []
    for case in cases:
        try:
            found.append(function(*case))
        except Unanswered:
            found.append(...)
        except Exception as error:  # show any error in the reader's code as one line
            return stopped(error, at(function, case))
    if all(x is None or x is ... for x in found):
        return NOTHING
    wanted = [_result(right, n, case) for n, case in enumerate(cases)]
    wrong = [n for n in range(len(cases)) if not same(found[n], wanted[n], share)]
    if not wrong:
        return done
    for mistake, hint in mistakes:
        made = [_result(mistake, n, case, run) for n, case in enumerate(cases)]
        assert not all(same(x, y, share) for x, y in zip(made, wanted, strict=True)), f"no mistake: {hint}"
        if all(same(x, y, share) for x, y in zip(found, made, strict=True)):
            return hint
    first, where = wrong[0], at(function, cases[wrong[0]])
    got, want = shape(found[first]), shape(wanted[first])
    if got != want:
        return f"Not yet{where}: your result has shape {got}, and should have {want}."
    often = "as in every case" if len(wrong) == len(cases) > 1 else "though not in every case" if len(cases) > 1 else ""
    error = off_by(found[first], wanted[first])
    return f"Not yet: it is wrong{where}{often and ', '}{often}. Your answer there is {brief(found[first])}{error}."


_results: dict | None = None  # of right answers and of mistakes in each case, while `expect` tests a checker


def _result(function, number: int, case: tuple, run=None):
    compute = lambda: (run(function) if run else function)(*case)
    if _results is None:
        return compute()
    if (function, number) not in _results:
        _results[function, number] = compute()
    return _results[function, number]


def checker(*args, **more):
    """Return a checker of an exercise: `diagnose` with all of its arguments but the answer."""
    return lambda answer: diagnose(answer, *args, **more)


def verdict(judge):
    """Turn a function of the value that a reader's function returns into a checker. It shows any error as one line."""

    @functools.wraps(judge)
    def check(answer):
        try:
            value = answer() if callable(answer) else answer
            return NOTHING if value is None or value is ... else judge(value)
        except Unanswered:
            return NOTHING
        except UserError as error:
            return f"The planner rejects this: {str(error).strip().splitlines()[0][:200]}"
        except Exception as error:  # show any error in the reader's code as one line
            return stopped(error)

    return check


def stopped(error: Exception, where: str = "") -> str:
    """Describe an error in one line."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"It stops{where}: {type(error).__name__}" + f": {line[:200]}" * bool(line)


def expect(check, *replies: tuple) -> None:
    """Assert what a checker replies: pairs of an answer and words of its reply. Without an answer, that is NOTHING."""
    global _results
    _results = {}
    try:
        for answer, words in (*replies, (None, NOTHING), (..., NOTHING)):
            line = check(answer)
            assert words in line, f"{words!r} is not in {line!r}"
    finally:
        _results = None


def shape(x) -> str:
    """Describe the shape of an array, or the shapes in a tuple, list or dict of arrays."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {shape(one)}" for key, one in x.items()) + "}"
    if isinstance(x, tuple | list):
        return f"({', '.join(map(shape, x))})"
    return str(getattr(x, "shape", ()))


def off_by(got, want) -> str:
    """Say by how much an answer differs, e.g. ", 1.5 times the right value"; "" if it is not made of numbers."""
    got, want = ([np.asarray(x) for x in jax.tree.leaves(t)] for t in (got, want))
    if not want or any(x.dtype.kind not in "iuf" for x in (*got, *want)) or len(got) != len(want):
        return ""
    got, want = (np.concatenate([np.ravel(np.float64(x)) for x in t]) for t in (got, want))
    if got.shape != want.shape or not want.any() or not np.isfinite(got).all():
        return ""
    if want.size == 1:
        return f", {got[0] / want[0]:.3g} times the right value"
    times = got @ want / (want @ want)
    if np.abs(got - times * want).max() <= 1e-3 * np.abs(want).max():
        return f", and every entry is {times:.3g} times the right one"
    share = np.abs(got - want).max() / np.abs(want).max()
    return f", and an entry is off by as much as {share:.1%} of the largest right entry"


def at(function, case: tuple) -> str:
    """Describe the arguments of a case, e.g. " at n=4, Z=8"; "" if it has none."""
    try:
        names = [name for name, one in inspect.signature(function).parameters.items() if one.kind < one.VAR_POSITIONAL]
    except (TypeError, ValueError):
        names = []
    named = [f"{name}={brief(x)}" for name, x in zip(names, case, strict=False)] if len(names) == len(case) else []
    return f" at {', '.join(named or map(brief, case))}" if case else ""


def brief(x) -> str:
    """Format a value briefly: rounded numbers, short text, and arrays by their shape."""
    if isinstance(x, float):
        return f"{x:.6g}"
    if isinstance(x, tuple):
        return f"({', '.join(map(brief, x))}{',' if len(x) == 1 else ''})"
    if isinstance(x, int | str):
        return repr(x)
    if isinstance(x, jax.sharding.Mesh):
        return ",".join(f"{axis}={n}" for axis, n in x.shape.items() if n > 1) or "one device"
    if callable(x) or dataclasses.is_dataclass(x):
        return getattr(x, "__name__", getattr(x, "name", type(x).__name__))
    return f"an array {np.shape(x)}" if hasattr(x, "shape") and np.ndim(x) else str(x)[:60]


def odd_answers() -> list:
    """Return twenty answers that no exercise expects, as a tired reader might give them."""

    def fails(*_, **__):
        raise KeyError("expert")

    same_back = lambda *args, **_: args[0] if len(args) == 1 else args
    constant = lambda value: lambda *_, **__: value
    return [0, -1, 2.5, float("nan"), True, "8", "", [], {}, (1, 2), {"mesh": 3}, np.ones((2, 3)), object(), int,
            fails, same_back, constant(None), constant("eight"), constant([1, "a"]), constant(np.zeros((3, 2)))]  # fmt: skip


def check_all(names: dict) -> None:
    """Give every checker in a chapter's namespace all odd answers: each must return one line, and raise nothing."""
    checkers = [one for name, one in names.items() if name.startswith("check_") and callable(one)]
    assert checkers, "the chapter has no checker"
    for check in checkers:
        for answer in odd_answers():
            line = check(answer)
            assert isinstance(line, str) and line and "\n" not in line, f"{check.__name__}({brief(answer)}): {line!r}"


def seen_in_ring(order_S, devices: int, document_S, right: int, compare: bool = True, last: int | None = None):
    """Return which keys queries attend to in a ring (chapter 06) whose document IDs are right in `right` steps. [S, S]

    compare  False: in later steps than the first, documents aren't compared
    last     the last step in which keys count
    """
    S = len(order_S)
    device_S, slot_S = np.divmod(np.argsort(order_S), S // devices)
    step_SS = (device_S[:, None] - device_S) % devices  # in which a key arrives
    from_SS = (device_S[:, None] - np.minimum(step_SS, right)) % devices  # the device whose IDs are used
    used_SS = document_S[order_S][from_SS * (S // devices) + slot_S]
    same_SS = (document_S[:, None] == used_SS) | ((step_SS > 0) & (not compare))
    return np.tri(S, dtype=bool) & same_SS & (step_SS <= (devices if last is None else last))


APART: dict = {}  # the names of the cells that `run_apart` ran


def run_apart(code: str, names: dict) -> None:
    """Run a cell that readers don't get, with a copy of the names that they have.

    A checker that uses a name which only such a cell defines then fails as it would for a reader.
    """
    APART.update(names)
    file = f"<removed cell {hash(code)}>"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file  # for the lines of a traceback
    exec(compile(code, file, "exec"), APART)


@contextlib.contextmanager
def edited(function, **new):
    """Replace names in the cells that define a function, as if a reader had edited them."""
    names = function.__globals__
    before = {name: names[name] for name in new}
    names.update(new)
    try:
        yield
    finally:
        names.update(before)


def replaced(function, **new):
    """Return a function that replaces names in the cells of `function` while it runs."""

    def changed(*args, **more):
        with edited(function, **new):
            return function(*args, **more)

    return changed


def rewritten(*parts):
    """Return a function of pairs (old text, new text) that edits and reruns the source of functions and classes.

    It returns the last of them, as if a reader had made these edits.
    """
    # Of a class, inspect.getsource finds nothing in a notebook.
    methods = lambda kind: "\n".join(inspect.getsource(one) for one in vars(kind).values() if callable(one))
    source = lambda x: f"class {x.__name__}:\n{methods(x)}" if inspect.isclass(x) else inspect.getsource(x)
    before = "\n\n".join(map(source, parts))

    def changed(*swaps):
        space, text = dict(parts[-1].__globals__), before
        for old, new in swaps:
            assert old in text, old
            text = text.replace(old, new)
        exec(text, space)
        return space[parts[-1].__name__]

    return changed


def on_each(answer, mesh, in_specs):
    """Return a program that runs a reader's function on each device, and stacks what the devices return."""
    local = lambda *args: jax.tree.map(lambda x: jax.numpy.asarray(x)[None], answered(answer)(*args))
    out_specs = jax.sharding.PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def ratio(got, want) -> str:
    """Describe how a gradient differs from the right one, e.g. "equal", "2 times too big" or "another direction"."""
    got, want = (np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(t)]) for t in (got, want))
    times = got @ want / (want @ want)
    if np.abs(got - times * want).max() > 1e-3 * np.abs(want).max():
        return "another direction"
    if abs(times - 1) < 1e-3:
        return "equal"
    whole = lambda x: abs(x - round(x)) < 1e-3 and round(x)
    if whole(times):
        return f"{round(times)} times too big" if times > 0 else f"{round(times)} times the right one"
    return (
        f"1/{round(1 / times)} of it" if abs(times) > 1e-6 and whole(1 / times) else f"{times:.3g} times the right one"
    )


# The compiled program -------------------------------------------------------------------------------------------------


def compiled(function, mesh, *args) -> ledger.Ledger:
    """Compile a function of arrays, and return the program's collectives and the FLOPs of its matmuls."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return ledger.read(jitted.lower(*args).compile().as_text(), mesh)


def listed(found: ledger.Ledger) -> None:
    """Print the collectives of a program, one per line."""
    for one in found.collectives:
        times = f"{one.count:g} x " if one.count != 1 else ""
        where = re.sub(r"^\d+\.py:", "this page, line ", one.source)  # the file name of a notebook cell is a number
        print(f"{times}{one.kind} over {'*'.join(one.axes)}: {one.payload_bytes:,} bytes, a device sends "
              f"{one.wire_bytes:,}; {where}")  # fmt: skip
    if not found.collectives:
        print("no collectives")


def source(*functions) -> None:
    """Print the source of functions of the project, without docstrings."""
    for function in functions:
        function = inspect.unwrap(function)
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
        [node] = ast.parse("\n".join(lines)).body
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first, "value", None), ast.Constant):
            del lines[first.lineno - 1 : first.end_lineno]
        file = inspect.getsourcefile(function).replace("\\", "/").split("/")
        print(f"# {'/'.join(file[-2:]) if file[-2] in PACKAGES else file[-1]}")
        print("\n".join(lines).strip("\n") + "\n")


PACKAGES = ("bench", "pipeline", "kernels", "plan", "train", "weights", "data", "compile", "chapters")


# Figures --------------------------------------------------------------------------------------------------------------


def panels(title: str, *shape: int, **more):
    """Return a figure and its axes like `plt.subplots(*shape, **more)`, with a title at the left, above all of them."""
    figure, axes = plt.subplots(*shape, **more)
    figure.suptitle(title, x=0.02, ha="left")
    return figure, axes


def box(axes, x: float, y: float, wide: float = 1, high: float = 1, text="", size: float = 9, **look) -> None:
    """Draw a rectangle from its corner (x, y), with a text in its middle."""
    look = matplotlib.cbook.normalize_kwargs(look, Rectangle)
    axes.add_patch(
        Rectangle((x, y), wide, high, **{"facecolor": "none", "edgecolor": "black", "linewidth": 0.8} | look)
    )
    axes.text(x + wide / 2, y + high / 2, text, ha="center", va="center", size=size)


def blank(axes, **settings) -> None:
    """Remove the ticks and the frame of axes, and change settings such as xlim."""
    axes.set(**{"xticks": [], "yticks": []} | settings)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def slices(axes, mesh, spec, dims: str, title: str = "", colour_by: str | None = None) -> None:
    """Draw an array of one or two dims, sharded by `spec`. Each shard shows the numbers of the devices that hold it.

    dims       one letter per dim, e.g. "BD"
    colour_by  mesh axis whose color the shards get; by default the first axis that shards the array
    """
    spec = (*spec, *(None,) * (len(dims) - len(spec)))
    cuts = [int(np.prod([mesh.shape[a] for a in as_tuple(axis)])) for axis in spec]
    down, across = cuts if len(cuts) == 2 else (1, cuts[0])
    used = [a for axis in spec for a in as_tuple(axis) if mesh.shape[a] > 1]
    colour = COLORS.get(colour_by or (used[0] if used else ""), NEUTRAL)
    holders = {}
    for place in np.ndindex(mesh.devices.shape):
        where = dict(zip(mesh.axis_names, place, strict=True))
        piece = tuple(_number(where, mesh, axis) for axis in spec)
        piece = piece if len(piece) == 2 else (0, piece[0])
        holders.setdefault(piece, []).append(int(np.ravel_multi_index(place, mesh.devices.shape)))
    for (i, j), devices in holders.items():
        shade = 0.25 + 0.5 * ((i * across + j) / max(down * across - 1, 1))
        text = ",".join(map(str, devices)) if len(devices) < 5 else f"{devices[0]}..{devices[-1]}"
        place = j / across, 1 - (i + 1) / down, 1 / across, 1 / down
        box(axes, *place, text, facecolor=colour, alpha=shade)
    blank(axes, xlim=(0, 1), ylim=(0, 1), title=title, xlabel=dims[-1])
    axes.set_ylabel(dims[0] if len(dims) == 2 else "", rotation=0, labelpad=10)


def _number(where: dict, mesh, axis) -> int:
    number = 0
    for a in as_tuple(axis):
        number = number * mesh.shape[a] + where[a]
    return number
