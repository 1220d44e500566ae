"""Run an exercise without JAX: its checker and the reader's answer, with the modules that the chapter imports."""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import math
import re
import traceback
from types import ModuleType, SimpleNamespace

import numpy as np
from spmd import arrays, program

AXES = "data", "stage", "fsdp", "expert", "context", "tensor"  # as in config/mesh.py
YOURS = "your code"  # the file name of the reader's cell in tracebacks
NOTHING_PRINTED = "Your code printed nothing. Keep the last line, which prints the checker's reply."
OTHER_NAMES = "(Here are jax, jnp, np, and those names of the chapter that the exercise needs; a notebook has all.)"


class UserError(Exception):
    """A mistake that the message explains."""


def module(name: str, **names) -> ModuleType:
    """Make a module. A name that it lacks is refused with a sentence."""
    found = ModuleType(name)
    vars(found).update(names)

    def missing(attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise AttributeError(f"this page emulates a part of JAX, without {name}.{attribute}; use the notebook for it")

    found.__getattr__ = missing
    return found


def make_mesh(sizes, names=None, axis_types=None) -> program.Mesh:
    """`jax.make_mesh((8,), ("fsdp",))`, or `sharding.make_mesh("fsdp=4,tensor=2")`."""
    if isinstance(sizes, str):  # has all six axes, as in the project
        axes = dict.fromkeys(AXES, 1)
        return program.Mesh(axes | {name: int(size) for name, size in (one.split("=") for one in sizes.split(","))})
    return program.Mesh(dict(zip(names, sizes, strict=True)))


def fake_jax() -> ModuleType:
    pick = lambda place, names: {name: getattr(place, name) for name in names.split()}
    filled = lambda function: lambda shape, dtype=None: arrays.asarray(function(shape))
    convert = lambda x, dtype=None: arrays.asarray(x)
    jnp = module(
        "jax.numpy", sum=arrays.sum_, max=arrays.max_, dot=arrays.matmul, asarray=convert, array=convert,
        shape=lambda x: arrays.asarray(x).shape, square=lambda x: x * x, zeros=filled(np.zeros), ones=filled(np.ones),
        zeros_like=lambda x: arrays.asarray(x) * 0.0, ones_like=lambda x: arrays.asarray(x) * 0.0 + 1.0,
        float32=np.float32, round=arrays.round_, ravel=lambda x: arrays.reshape(x, (-1,)),
        arange=lambda *bounds: arrays.asarray(np.arange(*bounds)), argmax=arrays.argmax,
        **pick(arrays, "concatenate stack split where exp log tanh sqrt sign matmul transpose reshape mean add "
                       "subtract multiply divide"))  # fmt: skip
    collectives = "psum pmean pmax pmin all_gather psum_scatter all_to_all ppermute pcast axis_size axis_index"
    lax = module("jax.lax", dynamic_slice_in_dim=arrays.dynamic_slice_in_dim, **pick(program, collectives))
    sharding = module("jax.sharding", PartitionSpec=program.PartitionSpec, Mesh=program.Mesh, AxisType=AXIS_TYPE)
    random = module("jax.random", key=lambda seed: seed, normal=lambda key, shape=(): arrays.asarray(
        np.random.default_rng(key).normal(size=shape)))  # fmt: skip
    return module(
        "jax", numpy=jnp, lax=lax, sharding=sharding, random=random, device_get=np.asarray, P=program.PartitionSpec,
        nn=module("jax.nn", **pick(arrays, "relu silu gelu")), Array=arrays.Array,
        tree=module("jax.tree", map=program.tree_map, leaves=program.tree_leaves), jit=lambda function, **_: function,
        make_mesh=make_mesh, **pick(program, "shard_map grad value_and_grad typeof"))  # fmt: skip


AXIS_TYPE = SimpleNamespace(Auto="Auto", Explicit="Explicit", Manual="Manual")
jax = fake_jax()
STANDARD = {
    "contextlib": contextlib, "dataclasses": dataclasses, "functools": functools, "inspect": inspect, "math": math,
    "re": re, "jax": jax, "jnp": jax.numpy, "lax": jax.lax, "np": np, "P": program.PartitionSpec, "AxisType": AXIS_TYPE,
    "UserError": UserError, "AXES": AXES,
}  # fmt: skip


class Exercises:
    """The exercises of the file that `programs.write` writes."""

    def __init__(self, text: str):
        given = json.loads(text)
        compiled = lambda function, mesh, *args: program.counted(function, *args)
        self.modules = {"lesson": self._module("lesson", given["lesson"], compiled=compiled),
                        "sharding": self._module("sharding", given["sharding"], make_mesh=make_mesh)}  # fmt: skip
        self.by_name = {f"{one['chapter']} {one['number']}": one for one in given["exercises"]}

    @staticmethod
    def _module(name: str, source: str, **more) -> ModuleType:
        found = module(name, **STANDARD)
        exec(compile(source, name, "exec"), vars(found))
        vars(found).update(more)
        return found

    def names(self, name: str) -> dict:
        """Return what the cells of an exercise see."""
        found = STANDARD | self.modules | {"__name__": "exercise"}
        exec(compile(self.by_name[name]["code"], name, "exec"), found)
        return found

    def check(self, name: str, answer: str) -> str:
        """Run the reader's cell. Returns what it prints, or an error in one line."""
        out, said = io.StringIO(), ""
        try:
            names = self.names(name)
            with contextlib.redirect_stdout(out):
                exec(compile(answer, YOURS, "exec"), names)
        except SyntaxError as error:
            said = f"SyntaxError in line {error.lineno}: {error.msg}"
        except Exception as error:  # the reader's code may raise anything
            lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == YOURS]
            said = f"{type(error).__name__} in line {lines[-1] if lines else '?'}: {error}"
        shown = (out.getvalue() + said).strip() or NOTHING_PRINTED
        return f"{shown}\n{OTHER_NAMES}" if "NameError" in shown else shown
