"""A user's own file: import it without mixing its modules with ours, and show its errors as its own."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import jax

from errors import UserError, nearest
from plan.program import error_place
from plan.rows import ROOT


def is_ours(module) -> bool:
    """Whether a module is a file of this checkout, and not of a package that is installed in it."""
    file = getattr(module, "__file__", None) or ""
    return Path(file).is_relative_to(ROOT) and "site-packages" not in file


@contextlib.contextmanager
def modules_beside(file: Path):
    """Meanwhile a file imports the modules beside it first. A model.py or errors.py there is not taken for ours."""
    hidden = {} if file.is_relative_to(ROOT) else {name: one for name, one in sys.modules.items() if is_ours(one)}
    for name in hidden:
        del sys.modules[name]
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        sys.path.remove(str(file.parent))
        sys.modules.update(hidden)


@contextlib.contextmanager
def their_errors(doing: str):
    """Turn an error of the user's own code into one line that keeps its type, its message and its place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # anything that a program may raise
        place, words = error_place(error), " ".join(str(error).split())[:300]
        raise UserError(f"{doing}: {f'{place}: ' * bool(place)}{type(error).__name__}: {words}") from error


def load(text: str, arguments: str):
    """Import FILE and return FUNCTION and what gives its arguments' shapes.

    Raises: UserError if there is no such file, function or shapes; an error of the file as one line.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name:
        raise UserError(f"{text!r} should be FILE:FUNCTION, as in docs/mlp.py:step")
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"program_of_{Path(path).stem}", Path(path).resolve())
    if spec is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    with modules_beside(Path(path).resolve()), their_errors(f"cannot import {path}"):
        spec.loader.exec_module(module)
    known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise UserError(f"{path} has no function {name!r}; {nearest(name, known)}")
    if not hasattr(module, arguments):
        hint = "a tuple of jax.ShapeDtypeStruct, or a function that returns one"
        raise UserError(f"{path} has no {arguments!r}, which should be {hint}; --arguments gives it another name")
    return getattr(module, name), getattr(module, arguments)


def shapes_of(arguments, mesh) -> tuple:
    """The shapes that a file gives, as a tuple of trees.

    Raises: UserError for what has no shape.
    """
    with their_errors("the shapes of the arguments"), jax.sharding.use_abstract_mesh(mesh):
        found = arguments() if callable(arguments) else arguments
    found = tuple(found) if isinstance(found, tuple | list) else (found,)
    for leaf in jax.tree.leaves(found):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UserError(f"an argument is {leaf!r:.80}, which has no shape; use jax.ShapeDtypeStruct(shape, dtype)")
    return found
