"""The part of NumPy that the planner uses, in plain Python: the planner's page runs without NumPy.

An `Array` is a shape and the positions of its entries in a list. Views share the list. The results are those of NumPy,
which `tests/plan/test_in_page.py` checks; dtypes are those of Python's numbers.
"""

import array as machine
import builtins
import functools
import itertools
import math
import operator
import random as machine_random
import types

int8 = int16 = int32 = int64 = uint32 = integer = int
floating = float
number = (int, float)


def float64(x=0.0):
    """A type, as the argument of `astype` and `zeros`, and the conversion of a number or an array."""
    return asarray(x).astype(float) if isinstance(x, list | tuple) or hasattr(x, "shape") else float(x)


float16 = float32 = float64


class ndarray:
    __slots__ = ("at", "data", "shape")
    __hash__ = None

    def __init__(self, data: list, shape: tuple[int, ...], at=None):
        self.data, self.shape, self.at = data, shape, range(len(data)) if at is None else at

    @property
    def values(self) -> list:
        return self.data if isinstance(self.at, range) and len(self.at) == len(self.data) else [
            self.data[i] for i in self.at]  # fmt: skip

    ndim = property(lambda self: len(self.shape))
    dtype = property(lambda self: DType(next(iter(self.values), 0.0)))
    size = property(lambda self: len(self.at))
    nbytes = property(lambda self: 4 * self.size)  # of float32
    flat = property(lambda self: self.reshape(-1))
    T = property(lambda self: self.transpose())

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self):
        return f"array({self.tolist()})"

    def __bool__(self):
        (one,) = self.values
        return bool(one)

    def __float__(self):
        (one,) = self.values
        return float(one)

    def __int__(self):
        (one,) = self.values
        return int(one)

    def tolist(self):
        return [x.tolist() if isinstance(x, ndarray) else x for x in self] if self.shape else self.values[0]

    def copy(self):
        return ndarray(list(self.values), self.shape)

    def astype(self, kind):
        return ndarray([kind(x) for x in self.values], self.shape)

    def tobytes(self) -> bytes:
        return machine.array("q", self.values).tobytes()

    # Shapes

    def reshape(self, *shape):
        shape = [*shape[0]] if len(shape) == 1 and not isinstance(shape[0], int) else [*shape]
        if -1 in shape:
            shape[shape.index(-1)] = self.size // -math.prod(shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {tuple(shape)}")
        return ndarray(self.data, tuple(shape), self.at)

    def transpose(self, *axes):
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        axes = [*axes] or [*range(self.ndim)][::-1]
        strides = _strides(self.shape)
        shape, strides = tuple(self.shape[d] for d in axes), [strides[d] for d in axes]
        return ndarray(self.data, shape, [self.at[i] for i in _positions(shape, strides)])

    # Reductions

    def reduce(self, function, axis=None, keepdims=False):
        if axis is None:
            return function(self.values)
        if isinstance(axis, tuple):
            return functools.reduce(lambda x, one: x.reduce(function, one), sorted(axis, reverse=True), self)
        axis %= self.ndim
        n, inner = self.shape[axis], math.prod(self.shape[axis + 1 :])
        values, block = self.values, n * inner
        found = [function(values[first + i : first + block : inner]) for first in range(0, len(values), block or 1)
                 for i in range(inner)]  # fmt: skip
        shape = (*self.shape[:axis], *([1] * keepdims), *self.shape[axis + 1 :])
        return ndarray(found, shape) if shape else found[0]

    sum = lambda self, axis=None, **more: self.reduce(sum, axis, **more)
    mean = lambda self, axis=None: self.sum(axis) / (self.size if axis is None else self.shape[axis])
    max = lambda self, axis=None, initial=None, **more: (
        initial if not self.size and initial is not None else self.reduce(builtins.max, axis, **more))  # fmt: skip
    min = lambda self, axis=None, **more: self.reduce(builtins.min, axis, **more)
    any = lambda self, axis=None, **more: self.reduce(any, axis, **more)
    all = lambda self, axis=None, **more: self.reduce(builtins.all, axis, **more)

    def along(self, function, axis: int):
        """Replace each line along an axis with function(line), which may have another length."""
        last = moveaxis(self, axis, -1)
        values, n = last.values, last.shape[-1]
        lines = [[*function(values[first : first + n])] for first in range(0, len(values), n or 1)]
        shape = (*last.shape[:-1], len(lines[0]) if lines else 0)
        return moveaxis(ndarray([*itertools.chain(*lines)], shape), -1, axis)

    def cumsum(self, axis=0):
        return self.along(itertools.accumulate, axis)

    # Entries

    def find(self, key) -> "tuple[list[int], tuple[int, ...]]":
        """Return the positions of the selected entries, and the shape of the result."""
        key = key if isinstance(key, tuple) else (key,)
        key = [x for one in key for x in (one.nonzero() if _is_mask(one) else (one,))]
        used = sum(x is not None and x is not Ellipsis for x in key)
        rest = [slice(None)] * (self.ndim - used)
        place = next((i for i, x in enumerate(key) if x is Ellipsis), len(key))
        key[place : place + 1] = rest
        strides, places = iter(zip(self.shape, _strides(self.shape), strict=True)), []
        for one in key:  # (offsets along this dim or None for a new dim, whether it is an index array)
            size, stride = (1, 0) if one is None else next(strides)
            if isinstance(one, slice):
                places.append([i * stride for i in range(*one.indices(size))])
            elif one is None:
                places.append([0])
            else:
                index = asarray(one)
                if any(not -size <= i < size for i in index.values):
                    raise IndexError(f"index out of bounds for size {size}")
                places.append(ndarray([i % size * stride for i in index.values], index.shape))
        picked = [i for i, one in enumerate(places) if isinstance(one, ndarray)]
        if not picked:
            return [sum(one) for one in itertools.product(*places)], tuple(map(len, places))
        both = asarray(functools.reduce(operator.add, (places[i] for i in picked)))
        first = picked[0] if picked == [*range(picked[0], picked[-1] + 1)] else 0
        sliced = [one for one in places if not isinstance(one, ndarray)]
        before, after = sliced[:first], sliced[first:]
        found = [sum(a) + b + sum(c) for a in itertools.product(*before) for b in both.values
                 for c in itertools.product(*after)]  # fmt: skip
        return found, (*map(len, before), *both.shape, *map(len, after))

    def __getitem__(self, key):
        if isinstance(key, int):  # often, so without `find`
            inner = math.prod(self.shape[1:])
            if not -self.shape[0] <= key < self.shape[0]:
                raise IndexError(f"index {key} is out of bounds for size {self.shape[0]}")
            first = key % self.shape[0] * inner
            found, shape = self.at[first : first + inner], self.shape[1:]
        else:
            places, shape = self.find(key)
            found = [self.at[i] for i in places]
        return ndarray(self.data, shape, found) if shape else self.data[found[0]]

    def __setitem__(self, key, value):
        places, shape = self.find(key)
        values = broadcast_to(asarray(value), shape).values
        for i, x in zip(places, values, strict=True):
            self.data[self.at[i]] = x

    def nonzero(self):
        places = [i for i, x in enumerate(self.values) if x]
        index = [[i // stride % size for i in places] for size, stride in zip(self.shape, _strides(self.shape),
                                                                               strict=True)]  # fmt: skip
        return tuple(ndarray(one, (len(places),)) for one in index)

    def __matmul__(self, other):
        if _defers(other):
            return NotImplemented
        other = asarray(other)
        if other.ndim == 2:
            lines, columns = self.reshape(-1, self.shape[-1]), [column.values for column in other.T]
            found = [sum(map(operator.mul, line.values, column)) for line in lines for column in columns]
            return ndarray(found, (*self.shape[:-1], len(columns)))
        return self.along(lambda line: [sum(map(operator.mul, line, other.values))], -1).reshape(self.shape[:-1])


class DType:
    """The type of an array's entries."""

    def __init__(self, entry):
        kinds = {"b": bool, "i": int, "f": float}
        self.kind = next((kind for kind, one in kinds.items() if isinstance(entry, one)), "O")


def _is_mask(one) -> bool:
    return isinstance(one, ndarray) and one.size > 0 and isinstance(one.values[0], bool)


def _strides(shape) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _positions(shape, strides) -> list[int]:
    found = [0]
    for size, stride in zip(shape, strides, strict=True):
        found = [first + i * stride for first in found for i in range(size)]
    return found


def _defers(other) -> bool:
    """Return whether an operation with an array is left to the other operand, as NumPy does for such a class."""
    return getattr(other, "__array_ufunc__", "") is None


def _elementwise(function):
    def apply(x, y):
        if _defers(y):
            return NotImplemented
        x, y = broadcast_arrays(x, y)
        found = list(map(function, x.values, y.values))
        return ndarray(found, x.shape) if x.shape else found[0]

    return apply


def _both(x, y):  # & and | of booleans stay booleans
    return x and y if isinstance(x, bool) else x & y


for _name in "add sub mul truediv floordiv mod pow eq ne lt le gt ge rshift or_".split():
    _apply, _dunder = _elementwise(getattr(operator, _name)), _name.strip("_")
    setattr(ndarray, f"__{_dunder}__", _apply)
    setattr(ndarray, f"__r{_dunder}__", lambda self, other, apply=_apply: apply(other, self))
ndarray.__and__ = ndarray.__rand__ = _elementwise(_both)
ndarray.__neg__ = lambda self: ndarray([-x for x in self.values], self.shape)
ndarray.__abs__ = lambda self: ndarray([builtins.abs(x) for x in self.values], self.shape)
ndarray.__invert__ = lambda self: ndarray([not x for x in self.values], self.shape)


# Functions ------------------------------------------------------------------------------------------------------------


def asarray(x, dtype=None) -> ndarray:
    if not isinstance(x, ndarray):
        if hasattr(x, "__array__"):
            return asarray(x.__array__(), dtype)
        if isinstance(x, list | tuple | range):
            parts = [asarray(one) for one in x]
            if len({one.shape for one in parts}) > 1:
                raise ValueError("the parts of an array have different shapes")
            shape = (len(parts), *(parts[0].shape if parts else ()))
            x = ndarray([y for one in parts for y in one.values], shape)
        else:
            x = ndarray([x], ())
    return x.astype(dtype) if dtype in (int, float, bool) else x


array = lambda x, dtype=None: asarray(x, dtype).copy()
_shape = lambda shape: tuple(shape) if isinstance(shape, list | tuple) else (shape,)
full = lambda shape, value, dtype=None: ndarray([value] * math.prod(_shape(shape)), _shape(shape))
zeros = lambda shape, dtype=float: full(shape, dtype(0))
ones = lambda shape, dtype=float: full(shape, dtype(1))
empty = lambda shape, dtype=None: full(shape, None)
arange = lambda *bounds, dtype=None: ndarray([*range(*bounds)], (len(range(*bounds)),))
ndindex = lambda shape: itertools.product(*map(range, shape))
shape = lambda x: asarray(x).shape
reshape = lambda x, shape: x.reshape(shape)
transpose = lambda x, axes: x.transpose(axes)
ravel = lambda x: asarray(x).reshape(-1)
prod = lambda x, axis=None: asarray(x).reduce(math.prod, axis)
ptp = lambda x, axis: x.reduce(lambda line: builtins.max(line) - builtins.min(line), axis)
sort = lambda x, axis=-1: asarray(x).along(sorted, axis)
cumsum = lambda x: asarray(x).cumsum()
diff = lambda x, axis=-1: x.along(lambda line: map(operator.sub, line[1:], line), axis)
sign = lambda x: ndarray([(one > 0) - (one < 0) for one in x.values], x.shape)
matmul = lambda x, y: asarray(x) @ asarray(y)
eye = lambda n, dtype=None: array([[float(i == j) for j in range(n)] for i in range(n)])
ndim = lambda x: asarray(x).ndim
all = lambda x: builtins.all(asarray(x).values)
isfinite = lambda x: ndarray([math.isfinite(one) for one in asarray(x).values], asarray(x).shape)
array_equal = lambda x, y: asarray(x).shape == asarray(y).shape and asarray(x).values == asarray(y).values
minimum = _elementwise(builtins.min)
maximum = _elementwise(builtins.max)


def frombuffer(buffer: bytes, dtype) -> ndarray:
    values = machine.array("q")
    values.frombytes(buffer)
    return ndarray([*values], (len(values),))


def argsort(x) -> ndarray:
    values = asarray(x).values
    return array(sorted(range(len(values)), key=values.__getitem__))


def lexsort(keys, axis=-1) -> ndarray:
    """Sort by the last key first."""
    shape, columns = keys[0].shape, [key.values for key in reversed(keys)]
    n, found = shape[-1], []
    for first in range(0, len(columns[0]), n):
        found += sorted(range(n), key=lambda i, first=first: [column[first + i] for column in columns])
    return ndarray(found, shape)


def moveaxis(x: ndarray, start, end) -> ndarray:
    start, end = ([one % x.ndim for one in ([d] if isinstance(d, int) else d)] for d in (start, end))
    order = [d for d in range(x.ndim) if d not in start]
    for place, d in sorted(zip(end, start, strict=True)):
        order.insert(place, d)
    return x if order == [*range(x.ndim)] else x.transpose(order)


def expand_dims(x: ndarray, axis: int) -> ndarray:
    place = axis % (x.ndim + 1)
    return x.reshape(*x.shape[:place], 1, *x.shape[place:])


def broadcast_to(x, shape) -> ndarray:
    x, shape = asarray(x), tuple(shape)
    if x.shape == shape:
        return x
    sizes = (1,) * (len(shape) - x.ndim) + x.shape
    if any(size not in (1, n) for size, n in zip(sizes, shape, strict=True)):
        raise ValueError(f"cannot broadcast {x.shape} to {shape}")
    strides = [0 if size == 1 else stride for size, stride in zip(sizes, _strides(sizes), strict=True)]
    return ndarray(x.data, shape, [x.at[i] for i in _positions(shape, strides)])


def broadcast_arrays(*arrays) -> list[ndarray]:
    arrays = [*map(asarray, arrays)]
    sizes = itertools.zip_longest(*(x.shape[::-1] for x in arrays), fillvalue=1)
    shape = tuple(next((n for n in some if n != 1), 1) for some in sizes)[::-1]
    return [broadcast_to(x, shape) for x in arrays]


def where(condition, x, y):
    condition, x, y = broadcast_arrays(condition, x, y)
    return ndarray([a if c else b for c, a, b in zip(condition.values, x.values, y.values, strict=True)], x.shape)


def concatenate(arrays) -> ndarray:
    arrays = [*map(asarray, arrays)]
    values = [x for one in arrays for x in one.values]
    return ndarray(values, (sum(map(len, arrays)), *arrays[0].shape[1:]))


def stack(arrays, axis=0) -> ndarray:
    return moveaxis(asarray([*arrays]), 0, axis)


def roll(x: ndarray, by: int, axis: int) -> ndarray:
    return x.along(lambda line: [*line[-by:], *line[:-by]], axis)


def unique(x: ndarray, axis=None, return_index=False, return_counts=False):
    rows = [tuple(one.values) for one in x] if axis == 0 else x.values
    first, counts = {}, {}
    for i, row in enumerate(rows):
        first.setdefault(row, i)
        counts[row] = counts.get(row, 0) + 1
    order = sorted(first)
    shape = (len(order), *(x.shape[1:] if axis == 0 else ()))
    found = ndarray([*itertools.chain(*order)] if axis == 0 else order, shape)
    more = [array([of[row] for row in order]) for of, wanted in ((first, return_index), (counts, return_counts))
            if wanted]  # fmt: skip
    return (found, *more) if more else found


def take_along_axis(x: ndarray, index: ndarray, axis: int) -> ndarray:
    """For axis 1 only."""
    assert axis == 1
    index = broadcast_to(index, (*index.shape[:2], *x.shape[2:]))
    places = [asarray(range(n)).reshape(*((n if d == e else 1) for e in range(x.ndim))) for d, n in
              enumerate((x.shape[0], 0, *x.shape[2:]))]  # fmt: skip
    return x[(places[0], index, *places[2:])]


def ravel_multi_index(index, shape) -> ndarray:
    return functools.reduce(operator.add, (x * stride for x, stride in zip(index, _strides(shape), strict=True)))


class add:
    @staticmethod
    def at(x: ndarray, index, values) -> None:
        """Add to entries, which may be listed several times."""
        places, shape = x.find(index)
        for i, one in zip(places, broadcast_to(values, shape).values, strict=True):
            x.data[x.at[i]] += one


def tile(x, repeats) -> ndarray:
    """For as many repeats as dims."""
    x, repeats = asarray(x), _shape(repeats)
    x = x.reshape(*[1] * (len(repeats) - x.ndim), *x.shape)
    for axis, times in enumerate(repeats):
        x = moveaxis(concatenate([moveaxis(x, axis, 0)] * times), 0, axis)
    return x


def argpartition(x, k: int, axis=-1) -> ndarray:
    return x.along(lambda line: sorted(range(len(line)), key=line.__getitem__), axis)


def argmax(x, axis: int) -> ndarray:
    return asarray(x).along(lambda line: [builtins.max(range(len(line)), key=line.__getitem__)], axis).reduce(sum, axis)


def split(x, parts: int, axis=0) -> list[ndarray]:
    size = x.shape[axis] // parts
    return [x[(*[slice(None)] * (axis % x.ndim), slice(i * size, (i + 1) * size))] for i in range(parts)]


class random:
    @staticmethod
    def default_rng(seed):
        """Return a generator of normally distributed numbers, which are not those of NumPy."""
        generator = machine_random.Random(repr(seed))

        def normal(size=()):
            return ndarray([generator.gauss(0.0, 1.0) for _ in range(math.prod(_shape(size)))], _shape(size))

        def integers(low, high, size=()):
            return ndarray([generator.randrange(low, high) for _ in range(math.prod(_shape(size)))], _shape(size))

        def gumbel(size=()):
            draw = lambda: -math.log(-math.log(generator.random()))
            return ndarray([draw() for _ in range(math.prod(_shape(size)))], _shape(size))

        return types.SimpleNamespace(normal=normal, integers=integers, gumbel=gumbel)


abs = builtins.abs
max = lambda x, axis=None: asarray(x).max(axis)
min = lambda x, axis=None: asarray(x).min(axis)
