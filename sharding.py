"""Mesh axes, parameter declarations and thin collectives.

A parameter is declared once: its letters (one a dim), the mesh axis that splits each letter, how it starts. Init,
`shard_map` specs, planner and checkpoint read that declaration; nothing infers a layout from a path, a rank or a size.
"""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from config import AXES, MeshConfig
from errors import UserError

DATA, STAGE, FSDP, EXPERT, CONTEXT, TENSOR = AXES
BATCH = (DATA, FSDP, EXPERT)  # neighbours hold different sequences
SLICED = (FSDP, EXPERT, CONTEXT)  # neighbours hold different slices of every dense weight
TOKENS = (*BATCH, CONTEXT, TENSOR)  # neighbours hold different tokens between blocks
BATCH_SPEC = P(BATCH, CONTEXT)  # of tokens_BT and all that is shaped like it


def make_mesh(mesh: MeshConfig | str, devices=None) -> Mesh:
    """Arrange devices along the six axes, in the order of `config.AXES`; of a TPU slice, neighbours on nearest chips.

    Of several slices `data` alone crosses the slow network between them.
    Raises: UserError if there are fewer devices than the mesh holds, or `data` does not split over the slices.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    devices = jax.devices() if devices is None else devices
    check_enough(mesh, len(devices), devices[0].platform)
    size = min(map(len, slices := slices_of(devices)))
    count = -(-mesh.devices // size)
    if count > len(slices) or mesh.data % count:
        near = dataclasses.replace(mesh, data=-(-mesh.data // count) * count)
        raise UserError(
            f"mesh {mesh} takes {count} slices of {size} devices, and data={mesh.data} alone can cross the slow "
            f"network between them: use a multiple of {count}, as in {near}, or a mesh that fits into one slice"
        )
    a_slice = dataclasses.replace(mesh, data=mesh.data // count)
    # A mesh axis may take a part of a torus axis, as fsdp=8 does on 4x4x2.
    arrange = functools.partial(mesh_utils.create_device_mesh, tuple(a_slice.sizes.values()))
    blocks = [arrange(some[: a_slice.devices], allow_split_physical_axes=True) for some in slices[:count]]
    return Mesh(np.concatenate(blocks), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_enough(mesh: MeshConfig, count: int, platform: str) -> None:
    """Raises: UserError if a mesh holds more devices than there are."""
    if mesh.devices > count:
        factors = " * ".join(str(size) for size in mesh.sizes.values() if size > 1)
        needs = f"{factors} = {mesh.devices}" if "*" in factors else factors
        remedy = f"; --devices {mesh.devices} simulates them" if platform == "cpu" else ""
        raise UserError(f"mesh {mesh} needs {needs} devices, and there are {count}{remedy}")


def slices_of(devices) -> list[list]:
    """Devices by the TPU slice they belong to; others all together."""
    index = lambda device: getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
    return [list(some) for _, some in itertools.groupby(sorted(devices, key=index), key=index)]


# Declarations ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What is known of a parameter before it exists. Not a pytree: in a tree of declarations it is a leaf."""

    dims: str  # one letter per dim, stacking letters first
    shape: tuple[int, ...]  # of the whole array
    spec: P  # the mesh axes that split each dim
    std: float  # initial standard deviation; 0: every entry starts at `mean`
    mean: float
    dtype: Any
    decay: bool  # takes part in weight decay
    trainable: bool  # receives a gradient
    exact: bool  # used in its own dtype, not in the compute dtype
    fan_in: str = ""  # letters summed over when it is used, if any

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def param(dims, *, fan_in="", std=None, mean=0.0, residual=False, needs=None, decay=True, trainable=True, exact=False,
          **axis_of):  # fmt: skip
    """Declare a parameter: one letter per dim, and the mesh axis (or axes) that splits each letter.

    fan_in    letters summed over when it is used: it starts normal, with standard deviation 1 / sqrt(their product)
    std       standard deviation where fan_in does not say: a function of ModelConfig; with neither, all start at `mean`
    residual  it writes into the residual stream: its standard deviation is divided by sqrt(2 * n_layers), so that the
              stream's variance does not grow with depth (GPT-2, section 2.3)
    needs     function of ModelConfig; where it is false the parameter does not exist (None)
    exact     it is used in its own dtype, not in the compute dtype
    """
    metadata = dict(dims=dims, fan_in=fan_in, std=std, mean=mean, residual=residual, needs=needs, decay=decay,
                    trainable=trainable, exact=exact, axis_of=axis_of)  # fmt: skip
    return dataclasses.field(default=None, metadata=metadata)


def declare(block: type, sizes: dict[str, int], c, *, stacked="", stacked_axes: dict | None = None, **parts):
    """Return `block` holding a Declaration in place of each parameter, and `parts` in its other fields.

    sizes    the size of each letter
    stacked  letters of leading dims: the block is repeated along them
    """

    def read(dims, fan_in, std, mean, residual, needs, decay, trainable, exact, axis_of):
        if needs is not None and not needs(c):
            return None
        deviation = std(c) if std else 0.0
        if fan_in:
            deviation = 1 / math.sqrt(math.prod(sizes[letter] for letter in fan_in))
        if residual:
            deviation /= math.sqrt(2 * c.n_layers)
        dims, axes = stacked + dims, (stacked_axes or {}) | axis_of
        return Declaration(
            dims=dims,
            shape=tuple(sizes[letter] for letter in dims),
            spec=P(*(axes.get(letter) for letter in dims)),
            std=deviation, mean=mean, dtype=jnp.dtype(c.param_dtype), decay=decay, trainable=trainable,
            exact=exact, fan_in=fan_in,
        )  # fmt: skip

    return block(**{f.name: read(**f.metadata) for f in dataclasses.fields(block) if f.metadata}, **parts)


def map_named(function, tree):
    """Replace each leaf by function(name, leaf); a name is like 'blocks.moe.attention.w_out_HUD'."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(name(path), leaf), tree)


def named(tree) -> dict[str, Any]:
    """Flatten a tree of parameters or declarations to {name: leaf}: the names that people and checkpoints use."""
    flat = {}
    map_named(flat.__setitem__, tree)
    return flat


def map_sliced(function, w, *names):
    """Replace each parameter that lies in slices along FSDP by function(array, dim, axes, exact); the rest stays.

    w      a `flax.struct` of declared parameters, one layer's or stacked
    names  only these of its parameters, as a tuple; none: the whole class, and the classes in it
    """

    def one(field):
        array, metadata = getattr(w, field.name), field.metadata
        if array is None or not metadata:
            return array if array is None else map_sliced(function, array)
        sliced = [(letter, axes) for letter, axes in metadata["axis_of"].items() if FSDP in axes]
        if not sliced:
            return array
        [(letter, axes)] = sliced
        dim = array.ndim - len(metadata["dims"]) + metadata["dims"].index(letter)  # dims of layers come first
        return function(array, dim, axes, metadata["exact"])

    fields = {field.name: field for field in dataclasses.fields(w)}
    return tuple(one(fields[n]) for n in names) if names else type(w)(**{n: one(f) for n, f in fields.items()})


def specs(declarations):
    return jax.tree.map(lambda d: d.spec, declarations)


def shapes(declarations, mesh: Mesh | None = None):
    """ShapeDtypeStruct of every parameter, with its sharding if a mesh is given."""
    return jax.tree.map(
        lambda d: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=NamedSharding(mesh, d.spec) if mesh else None),
        declarations,
    )


class DoesNotSplit(UserError):
    """A dim of a parameter that its mesh axes do not divide."""

    def __init__(self, name: str, letter: str, size: int, axes: tuple[str, ...], parts: int):
        self.name, self.letter, self.size, self.axes, self.parts = name, letter, size, axes, parts
        self.what = (f"cannot split {letter}={size} of {name} over mesh axes {'*'.join(axes)} = {parts} devices "
                     f"({size} % {parts} = {size % parts})")  # fmt: skip
        super().__init__(f"{self.what}; use a multiple of {parts}, or a smaller axis")


def check_divides(declarations, mesh: Mesh) -> None:
    """Raises: DoesNotSplit for the first parameter with a dim that its mesh axes do not divide."""
    for name, d in named(declarations).items():
        for letter, size, axes in zip(d.dims, d.shape, d.spec, strict=True):
            axes = as_tuple(axes)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                raise DoesNotSplit(name, letter, size, axes, parts)


# Batches --------------------------------------------------------------------------------------------------------------


def own_rows(mesh: Mesh, batch_size: int, devices=None) -> np.ndarray:
    """Numbers, in order, of the rows of a global batch that this process's devices hold (or `devices` of the mesh)."""
    place = NamedSharding(mesh, P(BATCH)).devices_indices_map((batch_size,))
    numbers = [np.arange(batch_size)[place[device]] for device in (mesh.local_devices if devices is None else devices)]
    return np.unique(np.concatenate(numbers))


def put(batch: dict[str, np.ndarray], mesh: Mesh, batch_size: int | None = None) -> dict[str, jax.Array]:
    """Place host arrays [B, T], see `dataset.batch`, on the mesh: sequences over BATCH, positions over CONTEXT.

    batch_size  that of all processes, where `batch` holds the `own_rows` of this one alone; None: it holds all
    Sends: nothing between processes. Each gives its devices what they hold.
    """
    sharding = NamedSharding(mesh, BATCH_SPEC)
    (found,) = {len(x) for x in batch.values()}
    rows = np.arange(found) if batch_size is None else own_rows(mesh, batch_size)
    assert len(rows) == found, f"{found} rows are given, this process holds {len(rows)} of {batch_size}"

    def placed(x):
        def part(index):  # of the whole; rows that one device holds lie side by side in `x` too
            start, stop, _ = index[0].indices(shape[0])
            first = np.searchsorted(rows, start)
            return x[first : first + stop - start, index[1]]

        shape = (batch_size or found, *x.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return {name: placed(x) for name, x in batch.items()}


# A CONTEXT axis of n devices cuts a sequence into 2n chunks, and device i holds chunks i and 2n - 1 - i: one early, one
# late, so that under causal attention every device has the same work. (Zig-zag: arXiv:2407.21783, section 3.3.2.)


def own_chunks(x_bT):
    """The positions this device works on, of a whole sequence in order. Shapes: [b, T, ..] -> [b, T/n, ..]."""
    n, i = axis_size(CONTEXT), axis_index(CONTEXT)
    if n == 1:
        return x_bT
    size = x_bT.shape[1] // (2 * n)
    chunk = lambda number: jax.lax.dynamic_slice_in_dim(x_bT, number * size, size, axis=1)
    return jnp.concatenate([chunk(i), chunk(2 * n - 1 - i)], axis=1)


def in_order(x, *, dim, n: int | None = None):
    """Put positions that were joined over CONTEXT's n devices, device by device, into the order of the sequence."""
    n = axis_size(CONTEXT) if n is None else n
    if n == 1:
        return x
    chunks = x.reshape(*x.shape[:dim], 2 * n, -1, *x.shape[dim + 1 :])
    place = [2 * k if k < n else 2 * (2 * n - 1 - k) + 1 for k in range(2 * n)]  # where chunk k lies
    return jnp.take(chunks, np.array(place), axis=dim).reshape(x.shape)


def in_chunks(x, *, dim, n: int):
    """The inverse of `in_order`: positions in order, put so that cutting them in n gives each device its chunks."""
    chunks = x.reshape(*x.shape[:dim], 2 * n, -1, *x.shape[dim + 1 :])
    held = [chunk for i in range(n) for chunk in (i, 2 * n - 1 - i)]
    return jnp.take(chunks, np.array(held), axis=dim).reshape(x.shape)


# Collectives ----------------------------------------------------------------------------------------------------------
# The same as in jax.lax, with `dim=` for the array's dimension and the price in the docstring; `axes` is one mesh axis
# or several. On an axis of size 1 each is the identity, but the type still changes: check_vma tracks along which axes
# a value varies.


def inside_shard_map(function):
    """Decorator of what needs mesh axes. Raises: UserError where there are none, in place of "unbound axis name"."""

    @functools.wraps(function)
    def wrapped(*args, **options):
        try:
            return function(*args, **options)
        except NameError as error:
            if not (unbound := re.search(r"unbound axis name: (\w+)", str(error))):
                raise
            raise UserError(
                f"{function.__name__} needs the mesh axis {unbound[1]!r}, and outside of `shard_map` there is none: "
                "it works on one device's slices. `on_mesh.on_mesh` runs such a function on whole arrays"
            ) from None

    return wrapped


def as_tuple(axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


@inside_shard_map
def axis_size(axes) -> int:
    """How many devices lie along mesh axes."""
    return jax.lax.axis_size(axes)


@inside_shard_map
def axis_index(axes):
    """This device's place along mesh axes, from 0."""
    return jax.lax.axis_index(axes)


@inside_shard_map
def all_gather(x, axes, *, dim, to="varying"):
    """Join the slices of `dim` held along mesh axes.

    to   "invarying": `check_vma` knows that the result is the same on the devices that were joined
    Shapes: [.., D/n, ..] -> [.., D, ..], n = devices on the axes.
    Sends: (n - 1)/n of the joined array, per device. Backward: reduce-scatter, the same bytes.
    """
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True, to=to)


@inside_shard_map
def reduce_scatter(partial, axes, *, dim):
    """Add partial sums held along mesh axes, and keep this device's slice of `dim`.

    Shapes: [.., D, ..] -> [.., D/n, ..], n = devices on the axes.
    Sends: (n - 1)/n of the whole array, per device. Backward: all-gather, the same bytes.
    """
    return jax.lax.psum_scatter(partial, axes, scatter_dimension=dim, tiled=True)


@inside_shard_map
def psum(partial, axes):
    """Add partial sums held along mesh axes; every device gets the total.

    Sends: 2 (n - 1)/n of the array, per device. Backward: none, the total's gradient is already everywhere.
    """
    return jax.lax.psum(partial, axes)


@inside_shard_map
def all_to_all(x, axes, *, split_dim, join_dim):
    """Cut `split_dim` into one piece per device and send each to its device; join what arrives along `join_dim`.

    Shapes: [.., E, .., C, ..] -> [.., E/n, .., C*n, ..], n = devices on the axes.
    Sends: (n - 1)/n of the array, per device. Backward: all-to-all the other way, the same bytes.
    """
    return jax.lax.all_to_all(x, axes, split_dim, join_dim, tiled=True)


KERNELS_AS_CALLS = "kernels as calls"  # platform of a mesh on which `plan.layers` reads what kernels are given


def platform() -> str:
    """What the mesh is made of: cpu, gpu or tpu. Known while a function is traced: no branch is compiled for it."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def by_platform(*args, tpu, gpu, default):
    """Call the form of the mesh's platform, and trace no other; outside of a `shard_map`, of what is compiled for.

    gpu  in Triton, which XLA compiles for NVIDIA's GPUs since Ampere, compute capability 8.0; others get the default
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device and device.platform == KERNELS_AS_CALLS:  # first of all: a plan touches no device
        return jax.jit(default)(*args)
    if not re.match(r"([89]|1\d)\.", getattr(jax.local_devices()[0], "compute_capability", "8.0")):
        gpu = default
    if device is None:
        return jax.lax.platform_dependent(*args, tpu=tpu, cuda=gpu, default=default)
    return {"tpu": tpu, "gpu": gpu}.get(device.platform, default)(*args)


def branches() -> bool:
    """Whether layers are in a branch: with several stages, each skips its idle ticks."""
    return axis_size(STAGE) > 1


def shift(x, axis, by=1, *, in_branch=False):
    """Send every array of x `by` devices on along a mesh axis, around its end.

    in_branch  only some devices of the mesh may come here: whole groups along `axis`, but not all groups. XLA's CPU
               backend waits for every device at a permutation, so there an all_to_all, which waits for its group, does
               the same with n times the bytes
    Sends: the arrays. Backward: a shift the other way.
    """
    n = axis_size(axis)

    def permute(x):
        return jax.lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])

    def exchange(x):
        here = axis_index(axis)
        slots = jnp.zeros((n, *x.shape), x.dtype).at[(here + by) % n].set(x)
        return jax.lax.all_to_all(slots, axis, 0, 0, tiled=True)[(here - by) % n]

    send = exchange if in_branch and platform() == "cpu" else permute
    return jax.tree.map(lambda x: send(vary(x, axis)), x)


def own_slice(x, axes, *, dim):
    """This device's slice of what `all_gather` over the same axes joined. Sends nothing."""
    size = x.shape[dim] // axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, axis=dim)


@inside_shard_map
def vary(x, axes):
    """Declare that arrays may differ along mesh axes, where their types do not yet say so (a loop's carry must say it
    first). Sends: nothing. Backward: psum over the axes that were added.
    """

    def one(x):
        missing = tuple(a for a in as_tuple(axes) if a not in jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, x)
