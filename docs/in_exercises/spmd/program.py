"""`jax.shard_map`, collectives and gradients on emulated devices.

`shard_map` refuses a result that varies over a mesh axis that its spec does not name, as JAX does with `check_vma`.
`counted` runs a program and returns its collectives, with their bytes as in `compile/ledger.py`.
"""

import functools
import math
import operator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from spmd import arrays
from spmd.arrays import Array, asarray, cut, detach, join, mark_varying, running

TILED = "this page emulates {} only with tiled=True"


class PartitionSpec(tuple):
    def __new__(cls, *parts):
        return super().__new__(cls, parts)

    def __repr__(self):
        return f"PartitionSpec{tuple(self)!r}"


as_tuple = lambda axes: () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True)
class Mesh:
    shape: dict[str, int]  # the size of each axis, outermost first

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())

    def index(self, device: int, axes) -> int:
        """Return a device's index along mesh axes, of which the last counts fastest."""
        places = {}
        for axis in reversed(self.shape):
            device, places[axis] = divmod(device, self.shape[axis])
        return functools.reduce(lambda i, axis: i * self.shape[axis] + places[axis], as_tuple(axes), 0)

    def groups(self, axes) -> list[list[int]]:
        """Return the groups of devices that differ only along these axes, each in their order."""
        others, found = tuple(axis for axis in self.shape if axis not in as_tuple(axes)), {}
        for device in sorted(range(self.size), key=lambda device: self.index(device, axes)):
            found.setdefault(self.index(device, others), []).append(device)
        return [*found.values()]


# Trees ----------------------------------------------------------------------------------------------------------------


def is_node(tree) -> bool:
    return isinstance(tree, dict | list | tuple) and not isinstance(tree, PartitionSpec)


def tree_leaves(tree, is_leaf=None) -> list:
    if is_leaf and is_leaf(tree):
        return [tree]
    if is_node(tree):
        ones = [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else tree
        return [leaf for one in ones for leaf in tree_leaves(one, is_leaf)]
    return [] if tree is None else [tree]


def tree_map(function, tree, *others):
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(one[key] for one in others)) for key in tree}
    if is_node(tree):
        return type(tree)(tree_map(function, *ones) for ones in zip(tree, *others, strict=True))
    return None if tree is None else function(tree, *others)


def on_leaves(collective):
    """Let a collective take a tuple, list or dict of arrays."""

    @functools.wraps(collective)
    def apply(x, *args, **more):
        return tree_map(lambda leaf: collective(asarray(leaf), *args, **more), x)

    return apply


# Collectives ----------------------------------------------------------------------------------------------------------


@dataclass
class Collective:
    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    wire_bytes: float  # that a device sends
    count: int = 1


@dataclass
class Ledger:
    """The collectives of a program, with the names of `compile/ledger.py`."""

    collectives: list[Collective] = field(default_factory=list)

    @property
    def total(self):
        return SimpleNamespace(wire_bytes=sum(one.wire_bytes for one in self.collectives))


ledgers: list[Ledger] = []  # of the programs whose collectives are counted


def counted(program, *args) -> Ledger:
    """Run a program, and return its collectives."""
    ledgers.append(Ledger())
    try:
        program(*args)
        return ledgers[-1]
    finally:
        ledgers.pop()


def known(axes) -> tuple[str, ...]:
    """Raises: NameError for an axis that no running shard_map has."""
    for axis in as_tuple(axes):
        if not running or axis not in running[-1].shape:
            raise NameError(
                f"Found an unbound axis name: {axis}. Only a function inside jax.shard_map knows its mesh axes."
            )
    return as_tuple(axes)


def axis_size(axes) -> int:
    return math.prod(running[-1].shape[axis] for axis in known(axes))


def axis_index(axes) -> Array:
    mesh = running[-1] if known(axes) else None
    return Array([np.asarray(mesh.index(device, axes)) for device in range(mesh.size)], as_tuple(axes))


def pcast(x, axes, to="varying") -> Array:
    x = asarray(x)
    if to != "varying" or x.varying & {*known(axes)}:
        raise ValueError(f"pcast to {to!r} over {as_tuple(axes)}, but the array varies over {sorted(x.varying)}")
    return mark_varying(x, as_tuple(axes))


def exchange(kind: str, x: Array, axes, function, invariant=False, back=None, payload: int = 0) -> Array:
    """Exchange arrays within each group of devices along axes.

    function   the parts of a group -> its results
    invariant  the results of a group are equal, and typed so
    back       the gradient of the result -> the gradient of x
    payload    entries that the bytes are counted from; 0: those of x
    """
    mesh, axes, n = running[-1] if known(axes) else None, as_tuple(axes), axis_size(axes)
    if len({axis in x.varying for axis in axes}) > 1:
        raise ValueError(
            f"over {axes}, the array is varying along some axes and invarying along others: pcast it first"
        )
    x, parts = mark_varying(x, axes), [None] * mesh.size
    for group in mesh.groups(axes):
        for device, part in zip(group, function([x.parts[device] for device in group]), strict=True):
            parts[device] = np.asarray(part)
    share = {"all-reduce": 2 * (n - 1), "collective-permute": n}.get(kind, n - 1)  # of n
    if n > 1 and ledgers:
        size = 4 * (payload or x.size)
        sent = divmod(share * size, n)
        ledgers[-1].collectives.append(Collective(kind, axes, size, sent[0] if not sent[1] else share * size / n))
    tracked = back and x.pullback
    varying = x.varying - {*axes} if invariant else x.varying
    return Array(parts, varying, (x,) if tracked else (), (lambda g: (back(g),)) if tracked else None)


def equal(function):
    """Return a function of a group's parts whose result every device of the group gets."""
    return lambda parts: [function(parts)] * len(parts)


added = functools.partial(functools.reduce, operator.add)


@on_leaves
def psum(x, axes):
    return exchange("all-reduce", x, axes, equal(added), invariant=True, back=lambda g: mark_varying(g, as_tuple(axes)))


@on_leaves
def pmean(x, axes):
    return psum(x, axes) / axis_size(axes)


@on_leaves
def pmax(x, axes):
    return exchange("all-reduce", x, axes, equal(functools.partial(functools.reduce, np.maximum)), invariant=True)


@on_leaves
def pmin(x, axes):
    return exchange("all-reduce", x, axes, equal(functools.partial(functools.reduce, np.minimum)), invariant=True)


@on_leaves
def all_gather(x, axes, *, axis=0, tiled=False, to="varying"):
    if not tiled:
        raise NotImplementedError(TILED.format("all_gather"))
    back = lambda g: psum_scatter(mark_varying(g, as_tuple(axes)), axes, scatter_dimension=axis, tiled=True)
    if to == "invarying":  # every device has the whole gradient already
        back = lambda g: local_shard(g, axes, axis)
    gather = equal(lambda parts: join(parts, axis))
    return exchange("all-gather", x, axes, gather, to == "invarying", back, x.size * axis_size(axes))


def local_shard(x: Array, axes, axis: int) -> Array:
    size = x.shape[axis] // axis_size(axes)
    return arrays.dynamic_slice_in_dim(x, axis_index(axes) * size, size, axis)


@on_leaves
def psum_scatter(x, axes, *, scatter_dimension=0, tiled=False):
    if not tiled:
        raise NotImplementedError(TILED.format("psum_scatter"))
    scatter = lambda parts: cut(added(parts), len(parts), scatter_dimension)
    back = lambda g: all_gather(g, axes, axis=scatter_dimension, tiled=True)
    return exchange("reduce-scatter", x, axes, scatter, back=back)


@on_leaves
def all_to_all(x, axes, split_axis, concat_axis, *, tiled=False):
    if not tiled:
        raise NotImplementedError(TILED.format("all_to_all"))

    def transposed(parts):
        chunks = [cut(part, len(parts), split_axis) for part in parts]
        return [join(row, concat_axis) for row in zip(*chunks, strict=True)]

    back = lambda g: all_to_all(g, axes, concat_axis, split_axis, tiled=True)
    return exchange("all-to-all", x, axes, transposed, back=back)


@on_leaves
def ppermute(x, axis, perm):
    def send(parts):
        found = [np.zeros(part.shape) for part in parts]
        for start, end in perm:
            found[end] = parts[start]
        return found

    back = lambda g: ppermute(g, axis, [(end, start) for start, end in perm])
    return exchange("collective-permute", x, axis, send, back=back)


arrays.total = psum


def typeof(x):
    """`jax.typeof`, for code that asks over which axes an array varies."""
    return SimpleNamespace(mat=SimpleNamespace(varying=asarray(x).varying))


# shard_map ------------------------------------------------------------------------------------------------------------


def shard_map(function, *, mesh, in_specs, out_specs, check_vma=True):
    """Return a function of arrays of the host that runs `function` on every device's shards."""

    def run(*args):
        given = in_specs if is_node(in_specs) else (in_specs,) * len(args)
        shards = tuple(on_specs(lambda x, spec: shards_of(np.asarray(x), spec, mesh), *pair)
                       for pair in zip(args, given, strict=True))  # fmt: skip
        running.append(mesh)
        try:
            return on_specs(lambda x, spec: whole(asarray(x), spec, mesh, check_vma), function(*shards), out_specs)
        finally:
            running.pop()

    return run


def on_specs(function, tree, specs):
    """Call function(leaf, its spec). A spec may be that of all leaves."""
    return tree_map(function, tree, specs) if is_node(specs) else tree_map(lambda leaf: function(leaf, specs), tree)


def shards_of(x, spec, mesh: Mesh) -> Array:
    parts = [x] * mesh.size
    for dim, axes in enumerate(spec):
        n = math.prod(mesh.shape[axis] for axis in as_tuple(axes))
        parts = [cut(part, n, dim)[mesh.index(device, axes)] for device, part in enumerate(parts)]
    return Array(parts, {axis for axes in spec for axis in as_tuple(axes)})


def whole(x: Array, spec, mesh: Mesh, check_vma: bool):
    """Put the shards of all devices together. Raises: ValueError if they vary over an axis that the spec lacks."""
    missing = x.varying - {axis for axes in spec for axis in as_tuple(axes)}
    if missing and check_vma:
        raise ValueError(f"out_specs is {spec!r}, but the result varies over {', '.join(sorted(missing))}: it may "
                         "differ between these devices, for example because a psum is missing")  # fmt: skip

    def joined(devices: list[int], dims: list[int]):
        if not dims:
            return x.parts[devices[0] % len(x.parts)]
        of_index = {}
        for device in devices:
            of_index.setdefault(mesh.index(device, spec[dims[0]]), []).append(device)
        found = [joined(of_index[i], dims[1:]) for i in sorted(of_index)]
        return join(found, dims[0]) if len(found) > 1 else found[0]

    return joined([*range(mesh.size)], [dim for dim, axes in enumerate(spec) if axes])


# Gradients ------------------------------------------------------------------------------------------------------------


def grad(function, argnums=0):
    return lambda *args, **more: value_and_grad(function, argnums)(*args, **more)[1]


def value_and_grad(function, argnums=0):
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    tracked = lambda x: Array(asarray(x).parts, asarray(x).varying, (), lambda g: ())

    def both(*args, **more):
        args = [tree_map(tracked, x) if place in places else x for place, x in enumerate(args)]
        value = function(*args, **more)
        if not isinstance(value, Array) or value.shape:
            got = f"shape {value.shape}" if isinstance(value, Array) else repr(value)
            raise TypeError(f"Gradient only defined for scalar-output functions. Output had {got}.")
        gradients = pull_back(value)
        of = lambda x: on_host(gradients[id(x)] if id(x) in gradients else detach(x) * 0.0)
        found = tuple(tree_map(of, args[place]) for place in places)
        return on_host(detach(value)), found[0] if isinstance(argnums, int) else found

    return both


def on_host(x: Array):
    """Outside of a shard_map, return NumPy's array."""
    return x if running else x.parts[0]


def pull_back(value: Array) -> dict[int, Array]:
    """Return the gradient of a number with respect to every array that it depends on, by the array's id."""
    order, seen = [], set()

    def visit(x):
        if x.pullback and id(x) not in seen:
            seen.add(id(x))
            for parent in x.parents:
                visit(parent)
            order.append(x)

    visit(value)
    gradients = {id(value): detach(value) * 0.0 + 1.0}
    for x in reversed(order):
        if id(x) in gradients:
            for parent, gradient in zip(x.parents, x.pullback(gradients[id(x)]), strict=True):
                if gradient is not None and parent.pullback:
                    gradients[id(parent)] = gradient + gradients.get(id(parent), 0.0)
    return gradients
