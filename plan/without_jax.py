"""Let the planner be imported without JAX, which takes a second to import, and which a browser does not have.

The planner imports the model, whose functions need JAX only when they run. `install()` makes packages importable that
are missing, or too slow to import. What the declarations of parameters need is defined here. Everything else is a
`Missing`, which may be a decorator, a type or a default, but not do any work: see `ready`.

`python -m plan` begins this way. If it needs JAX after all, for example to trace a layer of a new kind, then `retry`
starts it again with JAX. The planner's page (`docs/in_page`) has no JAX, and prints an error instead.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PACKAGES = {"absl", "flax", "jax", "jaxlib", "optax", "orbax"}
MESH_UTILS = "jax.experimental.mesh_utils"
WITH_JAX = "PLAN_WITH_JAX"  # this environment variable is set in the process that `retry` starts
error = None  # makes the exception of a `Missing` that is called; None while modules are imported


class NeedsJax(BaseException):
    """The planner called a function of JAX. Not an Exception, so that nothing takes it for a refused mesh."""


class Missing:
    """A name of a package that is missing."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **more):
        if error:
            raise error(self.__name__)
        return self

    def __mro_entries__(self, bases):
        return ()

    __getitem__ = __or__ = __ror__ = __neg__ = lambda self, *_: self


class PartitionSpec(tuple):
    def __new__(cls, *parts):
        return super().__new__(cls, parts)

    def __repr__(self):
        return f"PartitionSpec{tuple(self)!r}"


def struct(cls: type) -> type:
    """`flax.struct.dataclass`"""
    cls.replace = dataclasses.replace
    return dataclasses.dataclass(frozen=True)(cls)


def map_with_path(function, tree, path: tuple[str, ...] = ()):
    """`jax.tree_util.tree_map_with_path`, for structs and named tuples of other leaves; a path is a tuple of names."""
    if tree is None:
        return None
    if not hasattr(tree, "replace") or not dataclasses.is_dataclass(tree):
        return function(path, tree)
    names = [field.name for field in dataclasses.fields(tree)]
    return type(tree)(**{name: map_with_path(function, getattr(tree, name), (*path, name)) for name in names})


class DType(str):
    """`numpy.dtype`, as far as a plan needs it."""

    name = property(str)
    itemsize = property(lambda self: {"bfloat16": 2, "float32": 4, "int8": 1}[str(self)])


DEFINED = {
    "flax.struct.dataclass": struct,
    "flax.struct.field": lambda pytree_node=True, **more: dataclasses.field(**more),
    "jax.numpy.dtype": functools.cache(DType),
    "jax.sharding.PartitionSpec": PartitionSpec,
    "jax.tree.map": lambda function, tree: map_with_path(lambda _, leaf: function(leaf), tree),
    "jax.tree_util.keystr": lambda path, **_: ".".join(path),
    "jax.tree_util.tree_map_with_path": map_with_path,
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find every module of some packages. Its names are those of DEFINED, or `Missing`."""

    def __init__(self, packages: set[str], mesh_utils: str):
        self.packages, self.mesh_utils = packages, mesh_utils

    def find_spec(self, name, path=None, target=None):
        if name == MESH_UTILS:
            return importlib.util.spec_from_file_location(name, self.mesh_utils)
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: attribute(spec.name, name)
        return module

    def exec_module(self, module):
        pass


def attribute(module: str, name: str):
    if name == "__file__":
        return f"/missing/{module}"
    if name.startswith("__") and name != "__version__":
        raise AttributeError(name)
    whole = f"{module}.{name}"
    if whole in DEFINED:
        return DEFINED[whole]
    if whole == MESH_UTILS or any(one.startswith(f"{whole}.") for one in DEFINED):
        return importlib.import_module(whole)
    return Missing(whole)


def install(packages: set[str], mesh_utils: str, jax_version: str) -> None:
    """mesh_utils: JAX's own file, which is plain Python with NumPy and chooses the neighbors on a mesh"""
    DEFINED["jax.__version__"] = jax_version
    sys.meta_path.insert(0, Finder(packages, mesh_utils))


def ready(make_error: Callable[[str], BaseException]) -> None:
    """Call it after the imports. From then on, a function of a missing package raises make_error(its name)."""
    global error
    error = make_error


def begin() -> None:
    """Install the stand-ins in place of JAX, unless it is imported already, or `retry` started this process."""
    if "jax" in sys.modules or WITH_JAX in os.environ:
        return
    if jax := importlib.util.find_spec("jax"):
        mesh_utils = Path(jax.origin).parent / "_src/mesh_utils.py"
        install(PACKAGES, str(mesh_utils), importlib.metadata.version("jax"))


def retry(main: Callable[[], int]) -> int:
    """Call main(). If it needs JAX, start this process again with JAX. What it has computed so far is lost."""
    ready(NeedsJax)
    try:
        return main()
    except NeedsJax:
        os.execve(sys.executable, sys.orig_argv, os.environ | {WITH_JAX: "1"})
