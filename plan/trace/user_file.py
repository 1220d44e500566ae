"""Import a user's file without confusing its modules with ours, and report its errors with their source lines."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import jax

from plan.trace.program import error_place
from plan.trace.rows import ROOT
from utils import UserError, suggest


def is_project_module(module) -> bool:
    """Return True if a module is a file of this checkout, and not of a package installed inside the checkout."""
    file = getattr(module, "__file__", None) or ""
    return Path(file).is_relative_to(ROOT) and "site-packages" not in file


@contextlib.contextmanager
def local_imports(file: Path):
    """Let a file import the modules in its own directory first, so that its model.py is not confused with ours."""
    hidden = (
        {} if file.is_relative_to(ROOT) else {name: one for name, one in sys.modules.items() if is_project_module(one)}
    )
    for name in hidden:
        del sys.modules[name]
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        sys.path.remove(str(file.parent))
        sys.modules.update(hidden)


@contextlib.contextmanager
def user_errors(doing: str):
    """Convert an error in user code to a UserError of one line with its type, message and source line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        place, message = error_place(error), " ".join(str(error).split())[:300]
        raise UserError(f"{doing}: {f'{place}: ' * bool(place)}{type(error).__name__}: {message}") from error


def load(text: str, arguments: str):
    """Import FILE and return FUNCTION and the variable with the shapes of its arguments.

    Raises: UserError if the file, function or variable does not exist, or if the import fails.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name:
        raise UserError(f"{text!r} should be FILE:FUNCTION, as in docs/mlp.py:step")
    if not Path(path).is_file():
        raise UserError(f"file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"program_of_{Path(path).stem}", Path(path).resolve())
    if spec is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    with local_imports(Path(path).resolve()), user_errors(f"cannot import {path}"):
        spec.loader.exec_module(module)
    known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise UserError(f"{path} has no function {name!r}; {suggest(name, known)}")
    if not hasattr(module, arguments):
        hint = "a tuple of jax.ShapeDtypeStruct, or a function that returns one"
        raise UserError(f"{path} does not define {arguments!r}: define {hint}, or pass another variable as --arguments")
    return getattr(module, name), getattr(module, arguments)


def shapes_of(arguments, mesh) -> tuple:
    """Return the argument shapes that a file defines, as a tuple of trees.

    Raises: UserError if a leaf has no shape.
    """
    with user_errors("cannot get the argument shapes"), jax.sharding.use_abstract_mesh(mesh):
        shapes = arguments() if callable(arguments) else arguments
    shapes = tuple(shapes) if isinstance(shapes, tuple | list) else (shapes,)
    for leaf in jax.tree.leaves(shapes):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UserError(f"argument {leaf!r:.80} has no shape; use jax.ShapeDtypeStruct(shape, dtype)")
    return shapes
