"""Apply the tables of `families.py`: list the tensors on disk, and convert their layouts in both directions."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

import sharding
from architectures import architecture, declare
from config import ModelConfig
from utils import UserError
from weights import families
from weights.families import Row, family_of


class Part(NamedTuple):
    """The slice of one of our parameters that a tensor on disk contains."""

    name: str  # name of our parameter
    index: tuple[int, ...]  # index along its stacking letters
    dims: str  # its remaining letters
    place: int  # among the parts of the tensor


class Piece(NamedTuple):
    """One tensor on disk, and the parts of our parameters in it."""

    hf_name: str
    shape: tuple[int, ...]
    layout: str
    parts: tuple[Part, ...]
    scale: float = 1.0  # ours is (the tensor + plus) times this factor
    plus: float = 0.0

    @property
    def changes_numbers(self) -> bool:
        """Return True unless ours are the same numbers, times a power of 2."""
        return bool(self.plus) or math.frexp(self.scale)[0] != 0.5


def pieces(c: ModelConfig, kind: str = "") -> list[Piece]:
    """List every tensor on disk for a model of this config, with the parts of our parameters in it.

    Raises: UserError if one of our parameters is not covered exactly once, if a tensor name occurs twice, or if the
    letters of a table row are not those of its parameters.
    """
    kind = kind or family_of(c)
    family, declared, stacks = families.FAMILIES[kind], sharding.flatten_named(declare(c)), architecture(c).stacks(c)
    rows = [(r, "", "", np.zeros((), int)) for r in family.outside]
    rows += [(r, f"{stack}.", family.layer_name.replace("{stack}", stack.split(".")[0]), n)
             for r in family.layer for stack, _, n in stacks if stack.startswith(r.stack)]  # fmt: skip
    tensors = []
    for r, ours, theirs, numbers in rows:
        r = r._replace(layout=r.layout.format(rope_dims=c.rope_dims))
        names = [ours + name for name in r.parameters]
        if (r.needs and not r.needs(c)) or not (known := [name for name in names if name in declared]):
            continue
        if len(known) < len(names):
            lacking = ", ".join(name for name in names if name not in declared)
            raise UserError(f"row {r.hf_name!r} of the {kind!r} mapping has {lacking}, but our model has no such "
                            "parameter")  # fmt: skip
        experts = range(c.n_experts) if "{expert}" in r.hf_name else [None]
        _check_letters(r, {name: declared[name].dims[numbers.ndim + (experts != [None]) :] for name in names}, kind)
        for index in np.ndindex(numbers.shape):
            for e in experts:
                at = index if e is None else (*index, e)
                parts = tuple(Part(name, at, declared[name].dims[len(at) :], i) for i, name in enumerate(names))
                name = (theirs + r.hf_name).format(layer=numbers[index], expert=e)
                shape, scale = disk_shape(r.layout, _sizes(parts, declared)), r.scale(c) if r.scale else 1.0
                tensors.append(Piece(name, shape, r.layout, parts, scale, r.plus))
    _check_complete(tensors, declared, kind)
    return tensors


def _check_letters(r: Row, dims: dict[str, str], kind: str) -> None:
    """Raises: UserError unless a row's layout has each letter of each of its parameters once."""
    factors = [[part[0] for part in factor] for word in r.layout.replace("*", "").split() for factor in _factors(word)]
    letters = [letter for factor in factors for letter in factor]
    for name, own in dims.items():
        places = [letter for letter in letters if letter in own]
        if sorted(places) != sorted(own) or len(factors) != len(own) or set(letters) - set("".join(dims.values())):
            raise UserError(f"the {kind!r} mapping has layout {r.layout!r} for {r.hf_name!r}, but {name} has dims "
                            f"{own!r}")  # fmt: skip


def _check_complete(tensors: list[Piece], declared: dict[str, sharding.Declaration], kind: str) -> None:
    """Raises: UserError unless each parameter is covered once and each tensor name is unique."""
    held = Counter()
    for part in (part for piece in tensors for part in piece.parts):
        held[part.name] += math.prod(declared[part.name].shape[len(part.index) :])
    for name, d in declared.items():
        if held[name] != d.size:
            times = f"{held[name] / d.size:g}" if held[name] else "no"
            raise UserError(f"the {kind!r} mapping has {times} rows for {name}; it should have exactly one")
    for name, n in Counter(piece.hf_name for piece in tensors).items():
        if n > 1:
            raise UserError(f"the {kind!r} mapping gives {n} tensors the name {name!r}; add {{layer}} or {{expert}} to "
                            "the name")  # fmt: skip


def _sizes(parts: Iterable[Part], declared: dict[str, sharding.Declaration]) -> dict[str, int]:
    shapes = [zip(declared[p.name].dims, declared[p.name].shape, strict=True) for p in parts]
    return {letter: size for shape in shapes for letter, size in shape} | {"*": len(shapes)}


def _factors(word: str) -> list[list[str]]:
    """Split a word of a layout into factors, each a list of concatenated letters: "H[K|R']" -> [["H"], ["K", "R'"]]."""
    return [factor.strip("[]").split("|") for factor in re.findall(r"\[[^]]+\]|[A-Z]\d*'?|\*", word)]


def disk_shape(layout: str, sizes: dict[str, int]) -> tuple[int, ...]:
    width = lambda factor: sum(sizes[part[0]] for part in factor)
    return tuple(math.prod(width(factor) for factor in _factors(word)) for word in layout.split())


def matching_views(disk: np.ndarray, ours: np.ndarray, layout: str, part: Part, sizes: dict[str, int]):
    """Yield pairs of views, of a tensor on disk and of our parameter, with the same numbers in the same order.

    To convert in either direction, assign one view to the other. There are three pairs if rotary pairs are permuted,
    else one.
    """
    factors, dims = [factor for word in layout.split() for factor in _factors(word)], part.dims
    view = disk.reshape([sum(sizes[one[0]] for one in factor) for factor in factors])
    if ["*"] in factors:
        view = view[(slice(None),) * (axis := factors.index(["*"])) + (part.place,)]
        del factors[axis]
    letters, pairs = [], None
    for axis, factor in enumerate(factors):
        mine = next(i for i, one in enumerate(factor) if one[0] in dims)
        start, one = sum(sizes[p[0]] for p in factor[:mine]), factor[mine]
        view = view[(slice(None),) * axis + (slice(start, start + sizes[one[0]]),)]
        letters.append(one[0])
        pairs = (one[0], int(one[1:-1] or sizes[one[0]])) if one.endswith("'") else pairs
    view = view.transpose([letters.index(letter) for letter in dims])
    if pairs is None:
        yield view, ours
        return
    (letter, width), rest = pairs, slice(pairs[1], None)
    before, half = (slice(None),) * dims.index(letter), width // 2
    for there, here in ((slice(0, width, 2), slice(half)), (slice(1, width, 2), slice(half, width)), (rest, rest)):
        yield view[(*before, there)], ours[(*before, here)]


def from_hf_layout(disk: np.ndarray, piece: Piece, part: Part, declared) -> np.ndarray:
    """Return one parameter's part of a tensor on disk, in our layout: in float32 if `piece.changes_numbers`."""
    sizes = _sizes(piece.parts, declared)
    if piece.changes_numbers:
        disk = disk.astype(np.float32)
    ours = np.empty([sizes[letter] for letter in part.dims], disk.dtype)
    for theirs_view, ours_view in matching_views(disk, ours, piece.layout, part, sizes):
        same = (piece.plus, piece.scale) == (0, 1)
        ours_view[...] = theirs_view if same else (theirs_view + piece.plus) * piece.scale
    return ours


def to_hf_layout(read: Callable[[str], np.ndarray], piece: Piece, declared) -> np.ndarray:
    """Return a tensor in its layout on disk; `read` returns our parameter by name."""
    sizes = _sizes(piece.parts, declared)
    disk = np.empty(piece.shape, read(piece.parts[0].name).dtype)
    for part in piece.parts:
        for theirs_view, ours_view in matching_views(disk, read(part.name)[part.index], piece.layout, part, sizes):
            same = (piece.plus, piece.scale) == (0, 1)
            theirs_view[...] = ours_view if same else ours_view / piece.scale - piece.plus
    return disk
