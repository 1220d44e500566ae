"""Mesh axes, parameter declarations, and thin wrappers of the collectives.

Each parameter is declared once: one letter per dim, the mesh axes that shard each letter, and its initial distribution.
Initialization, `shard_map` specs, the planner and checkpoints all read that declaration.
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
from utils import UserError

# What differs between devices along each axis, and so is sharded over it:
#   DATA     sequences; the weights are replicated
#   STAGE    blocks of layers (pipeline stages)
#   FSDP     sequences, and one dim of every weight matrix
#   EXPERT   sequences, routed experts, and one dim of all other weight matrices
#   CONTEXT  positions, and one dim of every weight matrix
#   TENSOR   heads, hidden widths and vocabulary of weights; positions of the residual stream
DATA, STAGE, FSDP, EXPERT, CONTEXT, TENSOR = AXES
BATCH = (DATA, FSDP, EXPERT)  # devices along these axes hold different sequences
SLICED = (FSDP, EXPERT, CONTEXT)  # these axes together shard one dim of each weight matrix, gathered before use
TOKENS = (*BATCH, CONTEXT, TENSOR)  # devices along these axes hold different tokens of the residual stream
BATCH_SPEC = P(BATCH, CONTEXT)  # the PartitionSpec of tokens_BT and of all arrays of the same shape


def make_mesh(mesh: MeshConfig | str, devices=None) -> Mesh:
    """Arrange devices along the six axes of `config.AXES`.

    Within a TPU slice, mesh neighbors are neighboring chips. With several slices, only the axis `mesh.across` crosses
    the slower network (DCN) between them: `data`, if not set.
    Raises: UserError if the mesh needs more devices than are available, or if the size of `mesh.across` is not a
    multiple of the number of slices.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    devices = jax.devices() if devices is None else devices
    check_enough(mesh, len(devices), devices[0].platform)
    size = min(map(len, slices := slices_of(devices)))
    count = -(-mesh.devices // size)
    if count > len(slices):
        raise UserError(f"mesh {mesh} needs {count} slices of {size} devices, and there are {len(slices)}")
    a_slice = mesh.in_slice(count)
    # allow_split_physical_axes: a mesh axis may use part of a torus axis, such as fsdp=8 on 4x4x2.
    arrange = functools.partial(mesh_utils.create_device_mesh, tuple(a_slice.sizes.values()))
    blocks = [arrange(some[: a_slice.devices], allow_split_physical_axes=True) for some in slices[:count]]
    blocks = np.concatenate(blocks, axis=AXES.index(mesh.across))
    return Mesh(blocks, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_enough(mesh: MeshConfig, count: int, platform: str) -> None:
    """Raises: UserError if the mesh needs more devices than `count`."""
    if mesh.devices > count:
        factors = " * ".join(str(size) for size in mesh.sizes.values() if size > 1)
        needs = f"{factors} = {mesh.devices}" if "*" in factors else factors
        remedy = f"; --devices {mesh.devices} simulates them" if platform == "cpu" else ""
        raise UserError(f"mesh {mesh} needs {needs} devices, and there are {count}{remedy}")


def slices_of(devices) -> list[list]:
    """Group devices by TPU slice. Other devices form one group."""
    index = lambda device: getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
    return [list(some) for _, some in itertools.groupby(sorted(devices, key=index), key=index)]


# Declarations ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Shape, sharding and initial values of a parameter. It is not a pytree, so it is a leaf in a tree."""

    dims: str  # one letter per dim, those of stacked layers first; see the legend in `model.py`
    shape: tuple[int, ...]  # of the unsharded array
    spec: P  # the mesh axes that shard each dim
    std: float  # initial standard deviation; 0: every entry starts at `mean`
    mean: float
    dtype: Any
    decay: bool  # weight decay applies
    trainable: bool  # receives a gradient
    exact: bool  # used in its own dtype instead of the compute dtype
    fan_in: str = ""  # letters that its matmul contracts, if any

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def param(dims, *, fan_in="", std=None, mean=0.0, residual=False, needs=None, decay=True, trainable=True, exact=False,
          **axis_of):  # fmt: skip
    """Declare a parameter: one letter per dim, and the mesh axis (or axes) that shards each letter.

    fan_in    letters of the dims that its matmul contracts. Initial values are normal with std 1 / sqrt(product of
              their sizes)
    std       fn(ModelConfig) -> initial standard deviation, if there is no fan_in. With neither, every entry is `mean`
    residual  the parameter writes to the residual stream: divide std by sqrt(2 * n_layers), so that the variance of the
              stream does not grow with depth (GPT-2, section 2.3)
    needs     fn(ModelConfig) -> whether the parameter exists; if not, it is None
    exact     use the parameter in its own dtype instead of the compute dtype
    """
    metadata = dict(dims=dims, fan_in=fan_in, std=std, mean=mean, residual=residual, needs=needs, decay=decay,
                    trainable=trainable, exact=exact, axis_of=axis_of)  # fmt: skip
    return dataclasses.field(default=None, metadata=metadata)


def declare(block: type, sizes: dict[str, int], c, *, stacked="", stacked_axes: dict | None = None, **parts):
    """Return a `block` (a flax struct) with a Declaration for each parameter, and `parts` as its other fields.

    sizes    letter -> size
    stacked  letters of the leading dims along which layers are stacked
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


STACKED = {"P": "layer", "L": "block", "J": "layer", "I": "layer"}  # letters of the leading dims of stacked parameters


def stacked_dims(d: Declaration) -> int:
    """Return how many leading dims count layers."""
    return len(d.dims) - len(d.dims.lstrip("".join(STACKED)))


def rows_and_columns(d: Declaration) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims of a parameter that are rows and columns of its matrices: those that its matmul contracts, and
    the others. Earlier dims count layers and experts, each with its own matrix. A vector has no columns."""
    first = d.dims.index(d.fan_in[0]) if d.fan_in else stacked_dims(d)
    middle = first + max(len(d.fan_in), 1)
    return tuple(range(first, middle)), tuple(range(middle, len(d.dims)))


def map_named(function, tree):
    """Replace each leaf with function(name, leaf). A name looks like 'blocks.moe.attention.w_out_HUD'."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(name(path), leaf), tree)


def flatten_named(tree) -> dict[str, Any]:
    """Flatten a tree of parameters or declarations to {name: leaf}, with the names that checkpoints use."""
    flat = {}
    map_named(flat.__setitem__, tree)
    return flat


def map_fsdp_sharded(function, w, *names):
    """Replace each parameter that is sharded over FSDP with function(array, dim, axes, exact).

    Here `axes` are all the axes that shard this `dim`: FSDP and, in most weights, others.

    w      a `flax.struct` of declared parameters, of one layer or stacked
    names  return only these parameters, as a tuple; without names, return all of w, including nested structs
    """

    def one(field):
        array, metadata = getattr(w, field.name), field.metadata
        if array is None or not metadata:
            return array if array is None else map_fsdp_sharded(function, array)
        sliced = [(letter, axes) for letter, axes in metadata["axis_of"].items() if FSDP in axes]
        if not sliced:
            return array
        [(letter, axes)] = sliced
        dim = array.ndim - len(metadata["dims"]) + metadata["dims"].index(letter)  # dims of layers come first
        return function(array, dim, axes, metadata["exact"])

    fields = {field.name: field for field in dataclasses.fields(w)}
    return tuple(one(fields[n]) for n in names) if names else type(w)(**{n: one(f) for n, f in fields.items()})


def drop_axis(spec: P, axis: str) -> P:
    """Return a PartitionSpec that does not shard over one mesh axis, and is otherwise the same."""
    keep = lambda axes: tuple(one for one in as_tuple(axes) if one != axis) or None
    return P(*(keep(axes) if axis in as_tuple(axes) else axes for axes in spec))


def replicas(d: Declaration) -> tuple[str, ...]:
    """Return the mesh axes along which a parameter is replicated."""
    return tuple(axis for axis in AXES if not any(axis in as_tuple(axes) for axes in d.spec))


def shard_over_replicas(d: Declaration, sizes: dict[str, int]) -> Declaration:
    """Shard a parameter over its replicas too: the first dim that splits evenly over them. If none does, the
    declaration is returned unchanged.

    sizes  mesh axis -> number of devices
    """
    axes = replicas(d)
    for dim, (size, split) in enumerate(zip(d.shape, d.spec, strict=True)):
        if size % math.prod(sizes[axis] for axis in (*as_tuple(split), *axes)) == 0:
            return dataclasses.replace(d, spec=P(*d.spec[:dim], (*as_tuple(split), *axes), *d.spec[dim + 1 :]))
    return d


def specs(declarations):
    return jax.tree.map(lambda d: d.spec, declarations)


def shapes(declarations, mesh: Mesh | None = None):
    """Return the ShapeDtypeStruct of every parameter, with its sharding if a mesh is given."""
    return jax.tree.map(
        lambda d: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=NamedSharding(mesh, d.spec) if mesh else None),
        declarations,
    )


class DoesNotSplit(UserError):
    """The size of a parameter's dim is not divisible by the mesh axes that shard it."""

    def __init__(self, name: str, letter: str, size: int, axes: tuple[str, ...], parts: int):
        self.name, self.letter, self.size, self.axes, self.parts = name, letter, size, axes, parts
        self.what = (f"cannot split {letter}={size} of {name} over mesh axes {'*'.join(axes)} = {parts} devices "
                     f"({size} % {parts} = {size % parts})")  # fmt: skip
        super().__init__(f"{self.what}; use a multiple of {parts}, or a smaller axis")


def check_divides(declarations, mesh: Mesh) -> None:
    """Raises: DoesNotSplit for the first dim whose size is not divisible by its mesh axes.

    declarations  a tree, or the result of `flatten_named`
    """
    named = declarations if isinstance(declarations, dict) else flatten_named(declarations)
    for name, d in named.items():
        for letter, size, axes in zip(d.dims, d.shape, d.spec, strict=True):
            axes = as_tuple(axes)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                raise DoesNotSplit(name, letter, size, axes, parts)


# Batches --------------------------------------------------------------------------------------------------------------


def own_rows(mesh: Mesh, batch_size: int, devices=None) -> np.ndarray:
    """Return the sorted indices of the sequences of a batch that this process's devices, or `devices`, hold."""
    place = NamedSharding(mesh, P(BATCH)).devices_indices_map((batch_size,))
    numbers = [np.arange(batch_size)[place[device]] for device in (mesh.local_devices if devices is None else devices)]
    return np.unique(np.concatenate(numbers))


def put(batch: dict[str, np.ndarray], mesh: Mesh, batch_size: int | None = None) -> dict[str, jax.Array]:
    """Shard host arrays [B, T] (see `dataset.batch`) over the mesh: sequences over BATCH, positions over CONTEXT.

    batch_size  global batch size, if `batch` has only this process's sequences (`own_rows`); None: `batch` has all
    Sends: nothing between processes. Each process copies sequences to its own devices.
    """
    sharding = NamedSharding(mesh, BATCH_SPEC)
    (count,) = {len(x) for x in batch.values()}
    rows = np.arange(count) if batch_size is None else own_rows(mesh, batch_size)
    assert len(rows) == count, f"got {count} rows, but this process holds {len(rows)} of {batch_size}"

    def placed(x):
        def local_shard(index):  # index: slices of the global array; a device's rows are adjacent in `x` too
            start, stop, _ = index[0].indices(shape[0])
            first = np.searchsorted(rows, start)
            return x[first : first + stop - start, index[1]]

        shape = (batch_size or count, *x.shape[1:])
        return jax.make_array_from_callback(shape, sharding, local_shard)

    return {name: placed(x) for name, x in batch.items()}


# With n devices along CONTEXT, a sequence has 2n chunks, and device i holds chunks i and 2n - 1 - i: one early and one
# late chunk, so that causal attention costs the same on every device (zig-zag: arXiv:2407.21783, section 3.3.2).


def own_chunks(x_bT):
    """Select this device's two chunks from a whole sequence in order. Shapes: [b, T, ..] -> [b, T/n, ..]."""
    n, i = axis_size(CONTEXT), axis_index(CONTEXT)
    if n == 1:
        return x_bT
    size = x_bT.shape[1] // (2 * n)
    chunk = lambda number: jax.lax.dynamic_slice_in_dim(x_bT, number * size, size, axis=1)
    return jnp.concatenate([chunk(i), chunk(2 * n - 1 - i)], axis=1)


def to_sequence_order(x, *, dim, n: int | None = None):
    """Reorder positions that were gathered over the n devices of CONTEXT into sequence order."""
    n = axis_size(CONTEXT) if n is None else n
    if n == 1:
        return x
    chunks = x.reshape(*x.shape[:dim], 2 * n, -1, *x.shape[dim + 1 :])
    place = [2 * k if k < n else 2 * (2 * n - 1 - k) + 1 for k in range(2 * n)]  # the index of chunk k
    return jnp.take(chunks, np.array(place), axis=dim).reshape(x.shape)


def to_zigzag_order(x, *, dim, n: int):
    """Reorder positions from sequence order so that an even split into n shards gives each device its two chunks."""
    chunks = x.reshape(*x.shape[:dim], 2 * n, -1, *x.shape[dim + 1 :])
    held = [chunk for i in range(n) for chunk in (i, 2 * n - 1 - i)]
    return jnp.take(chunks, np.array(held), axis=dim).reshape(x.shape)


# Collectives ----------------------------------------------------------------------------------------------------------
# The collectives of jax.lax, with `dim=` for the array's dimension. Each docstring gives the bytes sent. `axes` is one
# mesh axis or several. Over an axis of size 1 a collective is the identity, but it still changes the type: with
# check_vma, `shard_map` tracks in the type over which mesh axes a value varies, that is, differs between devices.


def inside_shard_map(function):
    """Decorator that turns JAX's NameError "unbound axis name" into a UserError that explains `shard_map`."""

    @functools.wraps(function)
    def wrapped(*args, **options):
        try:
            return function(*args, **options)
        except NameError as error:
            if not (unbound := re.search(r"unbound axis name: (\w+)", str(error))):
                raise
            raise UserError(
                f"{function.__name__} needs the mesh axis {unbound[1]!r}, which exists only inside `jax.shard_map`: it "
                "works on one device's shards, and `jax.shard_map` runs it on whole arrays"
            ) from None

    return wrapped


def as_tuple(axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


@inside_shard_map
def axis_size(axes) -> int:
    """Return the number of devices along one or several mesh axes."""
    return jax.lax.axis_size(axes)


@inside_shard_map
def axis_index(axes):
    """Return this device's index along one or several mesh axes, from 0."""
    return jax.lax.axis_index(axes)


@inside_shard_map
def all_gather(x, axes, *, dim, to="varying"):
    """Concatenate the shards of `dim` from all devices along mesh axes; every device gets the result.

    to  "invarying" tells `check_vma` that the result is the same on all these devices
    Shapes: [.., D/n, ..] -> [.., D, ..], n = devices on the axes.
    Sends: (n - 1)/n of the gathered array, per device. Backward: reduce-scatter, the same bytes.
    """
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True, to=to)


@inside_shard_map
def reduce_scatter(partial, axes, *, dim):
    """Add partial sums over mesh axes; each device gets its shard of `dim`.

    Shapes: [.., D, ..] -> [.., D/n, ..], n = devices on the axes.
    Sends: (n - 1)/n of the input array, per device. Backward: all-gather, the same bytes.
    """
    return jax.lax.psum_scatter(partial, axes, scatter_dimension=dim, tiled=True)


@inside_shard_map
def psum(partial, axes):
    """All-reduce: add partial sums over mesh axes; every device gets the total.

    Sends: 2 (n - 1)/n of the array, per device, n = devices on the axes. Backward: nothing, because every device
    already has the gradient of the total.
    """
    return jax.lax.psum(partial, axes)


@inside_shard_map
def all_to_all(x, axes, *, split_dim, join_dim):
    """Split `split_dim` into one chunk per device, send each device its chunk, and concatenate along `join_dim`.

    Shapes: [.., E, .., C, ..] -> [.., E/n, .., C*n, ..], n = devices on the axes.
    Sends: (n - 1)/n of the array, per device. Backward: the inverse all-to-all, the same bytes.
    """
    return jax.lax.all_to_all(x, axes, split_dim, join_dim, tiled=True)


KERNELS_AS_CALLS = "kernels as calls"  # `plan` traces on a mesh of this platform, where a kernel stays one call


def platform() -> str:
    """Return the platform of the mesh: cpu, gpu or tpu. It is known while tracing, so it needs no runtime branch."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def by_platform(*args, tpu, gpu, default):
    """Call the implementation for the mesh's platform, without tracing the others.

    Outside `shard_map` the mesh is unknown, so all are traced and the choice is made when JAX lowers the program.

    gpu  a Triton kernel. It needs an NVIDIA GPU with compute capability 8.0 (Ampere) or later; older ones use `default`
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device and device.platform == KERNELS_AS_CALLS:  # before jax.local_devices: a plan must not touch a device
        with jax.named_scope(KERNELS_AS_CALLS):
            return jax.jit(default)(*args)
    if not re.match(r"([89]|1\d)\.", getattr(jax.local_devices()[0], "compute_capability", "8.0")):
        gpu = default
    if device is None:
        return jax.lax.platform_dependent(*args, tpu=tpu, cuda=gpu, default=default)
    return {"tpu": tpu, "gpu": gpu}.get(device.platform, default)(*args)


def layers_in_branch() -> bool:
    """Return True if layers run inside a `cond`: with several pipeline stages, a stage skips ticks when it is idle."""
    return axis_size(STAGE) > 1


def shift(x, axis, by=1, *, in_branch=False):
    """Send every array of x to the device `by` places further along a mesh axis, wrapping around at the end.

    in_branch  as in `permute`
    Sends: the arrays. Backward: a shift in the other direction.
    """
    n = axis_size(axis)
    return permute(x, axis, [(i, (i + by) % n) for i in range(n)], in_branch=in_branch)


def permute(x, axis, pairs, *, in_branch=False):
    """Send every array of x along a mesh axis, for each pair from its first to its second device. A device that is in
    no pair's second place receives zeros.

    in_branch  True if only some groups of devices along `axis` call this, each group as a whole. At a ppermute, XLA's
               CPU backend waits for all devices of the mesh. So on CPU an all_to_all, which waits only for its group,
               replaces the ppermute and sends n times the bytes (n = devices on the axis)
    Sends: the arrays. Backward: the same pairs, reversed.
    """
    n = axis_size(axis)
    to, source = np.full(n, n), np.full(n, n)  # n: no device
    for first, second in pairs:
        to[first], source[second] = second, first

    def exchange(x):
        here = axis_index(axis)
        slots = jnp.zeros((n, *x.shape), x.dtype).at[jnp.asarray(to)[here]].set(x, mode="drop")
        received = jax.lax.all_to_all(slots, axis, 0, 0, tiled=True)
        return received.at[jnp.asarray(source)[here]].get(mode="fill", fill_value=0)

    send = exchange if in_branch and platform() == "cpu" else lambda x: jax.lax.ppermute(x, axis, pairs)
    return jax.tree.map(lambda x: send(vary(x, axis)), x)


def own_slice(x, axes, *, dim):
    """Return this device's shard of an array that every device has: the inverse of `all_gather`. No communication."""
    size = x.shape[dim] // axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, axis=dim)


@inside_shard_map
def vary(x, axes):
    """Mark arrays as varying over mesh axes (`jax.lax.pcast`).

    The backward pass adds up the devices' gradients with a psum over the axes that were added. Besides, `check_vma`
    requires the mark in some places, such as a loop's carry. Sends: nothing in the forward pass.
    """

    def one(x):
        missing = tuple(a for a in as_tuple(axes) if a not in jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, x)
