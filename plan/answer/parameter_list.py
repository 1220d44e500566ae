"""List the parameters of a model: shapes, mesh axes, and the shard of one device. From the declarations, so without JAX
arrays. `python -m plan PRESET --parameters` prints the list, and a run writes it to parameters.txt."""

import math
from dataclasses import dataclass

import sharding
from config import Config
from parameters import declare_stored
from pipeline import fit


@dataclass(frozen=True)
class Parameter:
    """One parameter, as training stores it between steps."""

    name: str
    letters: str  # one per dim; the legend is in `model.py`
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]  # the mesh axes that shard each dim, also those of size 1
    local_shape: tuple[int, ...]  # on one device
    local_bytes: int
    trainable: bool  # a router's selection bias is not

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters(cfg: Config) -> list[Parameter]:
    """List every parameter, in the order of the declarations. Raises: UserError if one does not split over the mesh."""
    fit.check(cfg.model, cfg.mesh, cfg.work)
    mesh, found = cfg.mesh.sizes, []
    for name, d in sharding.flatten_named(declare_stored(cfg)).items():
        spec = tuple(map(sharding.as_tuple, d.spec))
        pairs = zip(d.shape, spec, strict=True)
        local = tuple(size // math.prod(mesh[axis] for axis in axes) for size, axes in pairs)
        local_bytes = math.prod(local) * d.dtype.itemsize
        found.append(Parameter(name, d.dims, d.shape, str(d.dtype), spec, local, local_bytes, d.trainable))
    return found


def lines(cfg: Config) -> list[str]:
    """Return the list as a table of text. It leaves out mesh axes of size 1."""
    found, n = parameters(cfg), cfg.mesh.sizes
    sizes = lambda letters, shape: " ".join(f"{letter}={size}" for letter, size in zip(letters, shape, strict=True))
    rows = [("parameter", "shape", "dtype", "sharded over", "on a device", "bytes", "count")]
    for one in found:
        axes = ["*".join(axis for axis in axes if n[axis] > 1) for axes in one.spec]
        over = ", ".join(f"{letter} {over}" for letter, over in zip(one.letters, axes, strict=True) if over) or "-"
        rows.append((one.name, sizes(one.letters, one.shape), one.dtype, over, sizes(one.letters, one.local_shape),
                     f"{one.local_bytes:,}", f"{one.size:,}"))  # fmt: skip
    trained, others = (sum(one.size for one in found if one.trainable == kind) for kind in (True, False))
    local_bytes = sum(one.local_bytes for one in found)
    rows.append((f"all, on {cfg.mesh}", "", "", "", "", f"{local_bytes:,}", f"{trained + others:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    align = [*["<"] * 5, ">", ">"]
    text = ["  ".join(f"{x:{way}{width}}" for x, way, width in zip(row, align, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip
    note = f"{others:,} of the count are selection biases of routers, which no gradient trains and other counts omit"
    return [*text, *[note] * bool(others)]
