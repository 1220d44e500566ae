"""Let the planner be imported where JAX and NumPy can't be installed, as in a browser.

The planner imports the model, whose functions need JAX only when they run. `install()` makes every package that is
missing importable. What the declarations of parameters need is defined here. Everything else is a `Missing`, which may
be a decorator, a type or a default, but not do any work: see `ready`. NumPy's part is `numpy.py`.
"""

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

from utils import UserError

PACKAGES = {"absl", "flax", "jax", "jaxlib", "optax", "orbax", "resource", "tyro", "yaml"}
WHY = "this page has no JAX, which the planner needs for {}; use `python -m plan` on a computer"
MESH_UTILS = "jax.experimental.mesh_utils"
imported = False  # then a `Missing` that is called raises


class Missing:
    """A name of a package that is missing."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **more):
        if imported:
            raise UserError(WHY.format(self.__name__))
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


def dtype(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, itemsize={"bfloat16": 2, "float32": 4, "int8": 1}[str(name)])


DEFINED = {
    "flax.struct.dataclass": struct,
    "flax.struct.field": lambda pytree_node=True, **more: dataclasses.field(**more),
    "jax.numpy.dtype": functools.cache(dtype),
    "jax.sharding.PartitionSpec": PartitionSpec,
    "jax.tree.map": lambda function, tree: map_with_path(lambda _, leaf: function(leaf), tree),
    "jax.tree_util.keystr": lambda path, **_: ".".join(path),
    "jax.tree_util.tree_map_with_path": map_with_path,
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find every module of PACKAGES. Its names are those of DEFINED, or `Missing`."""

    def __init__(self, mesh_utils: str):
        self.mesh_utils = mesh_utils

    def find_spec(self, name, path=None, target=None):
        if name == MESH_UTILS:
            return importlib.util.spec_from_file_location(name, self.mesh_utils)
        if name.partition(".")[0] in PACKAGES:
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


def install(mesh_utils: str, jax_version: str) -> None:
    """mesh_utils: JAX's own file, which is plain Python with NumPy and chooses the neighbors on a mesh"""
    DEFINED["jax.__version__"] = jax_version
    sys.meta_path.insert(0, Finder(mesh_utils))


def ready() -> None:
    """Call it after the imports. From then on, a function of a missing package raises a UserError that names it."""
    global imported
    imported = True
