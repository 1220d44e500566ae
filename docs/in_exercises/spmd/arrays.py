"""Arrays on emulated devices, in plain Python: an array has one part per device.

Every operation runs on all parts. As in JAX, the type of an array says over which mesh axes it varies. An operation on
a varying and an invariant array marks the invariant one as varying (`pcast`), and the backward pass of this is a psum.
So gradients need the same collectives as in JAX.
"""

import itertools
import math
import operator

import numpy as np

running: list = []  # the meshes of the shard_maps that run: `program.py` puts them there
TRACED = ("Attempted to convert a traced array to {}: it may differ between devices, which all run the same Python. "
          "Use jnp.where or jax.lax.dynamic_slice_in_dim")  # fmt: skip


class Array:
    """One array per device, all of the same shape.

    varying   the mesh axes over which they may differ
    pullback  the gradient of this array -> the gradients of `parents`; None: nothing is differentiated through it
    """

    __array_ufunc__ = None  # an operation of NumPy's array and an Array is left to the Array
    __hash__ = object.__hash__

    def __init__(self, parts: list, varying=frozenset(), parents=(), pullback=None):
        self.parts, self.varying, self.parents, self.pullback = parts, frozenset(varying), parents, pullback

    shape = property(lambda self: self.parts[0].shape)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: 4 * self.size)
    dtype = property(lambda self: np.float32)
    T = property(lambda self: transpose(self))

    sum = lambda self, axis=None, keepdims=False: sum_(self, axis, keepdims)
    mean = lambda self, axis=None, keepdims=False: mean(self, axis, keepdims)
    max = lambda self, axis=None, keepdims=False: max_(self, axis, keepdims)
    astype = lambda self, dtype: self
    ravel = lambda self: reshape(self, (-1,))
    reshape = lambda self, *shape: reshape(self, shape[0] if isinstance(shape[0], tuple | list) else shape)
    transpose = lambda self, *axes: transpose(self, axes or None)

    def __array__(self, dtype=None, copy=None):  # what NumPy calls
        if running:
            raise TypeError(TRACED.format("an array of NumPy"))
        return self.parts[0]

    tolist = lambda self: self.__array__().tolist()

    def __repr__(self):
        where = f", varying over {'*'.join(sorted(self.varying))}" if self.varying else ""
        return f"Array(shape={self.shape}{where})"

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key):
        return take(self, key if isinstance(key, tuple) else (key,))

    def _convert(self, kind: type):
        if running:
            raise TypeError(TRACED.format(f"a Python {kind.__name__}"))
        return kind(number(self.parts[0]))

    __bool__ = lambda self: self._convert(bool)
    __float__ = lambda self: self._convert(float)
    __int__ = __index__ = lambda self: self._convert(int)


def number(part):
    """Return the only entry of a part."""
    if not hasattr(part, "shape"):
        return part
    if part.size != 1:
        raise TypeError(f"only an array with one entry is a number, and this one has shape {part.shape}")
    return part.reshape(-1).tolist()[0]


def asarray(x) -> Array:
    """Convert numbers, lists and arrays of the host, which are the same on all devices."""
    if isinstance(x, Array):
        return x
    if isinstance(x, list | tuple) and any(isinstance(one, Array) for one in x):
        return stack(x)
    return Array([np.asarray(x)] * (running[-1].size if running else 1))


def detach(x: Array) -> Array:
    return Array(x.parts, x.varying)


def mark_varying(x: Array, axes) -> Array:
    """Return an array that may differ along more axes. Backward: a psum, which `program.py` provides as `total`."""
    axes = tuple(sorted({*axes} - x.varying))
    if not axes:
        return x
    back = (lambda g: (total(g, axes),)) if x.pullback else None
    return Array(x.parts, x.varying | {*axes}, (x,) if back else (), back)


def total(x: Array, axes) -> Array:
    raise NotImplementedError("program.py replaces this by psum")


def local(function, *arrays, pullback=None) -> Array:
    """Call function(*parts) on each device. Where one of the arrays varies, all are marked as varying.

    pullback  (gradient, *arrays) -> a gradient for each array
    """
    arrays = [asarray(x) for x in arrays]
    varying = frozenset().union(*(x.varying for x in arrays))
    arrays = [mark_varying(x, varying) for x in arrays]
    devices = max(len(x.parts) for x in arrays)
    each = [[x.parts[i % len(x.parts)] for x in arrays] for i in range(devices if varying else 1)]
    parts = [np.asarray(function(*one)) for one in each] * (1 if varying else devices)
    if not pullback or not any(x.pullback for x in arrays):
        return Array(parts, varying)
    return Array(parts, varying, tuple(arrays), lambda gradient: pullback(gradient, *map(detach, arrays)))


# Arithmetic -----------------------------------------------------------------------------------------------------------


def unbroadcast(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Add up a gradient over the dims that broadcasting added or stretched."""
    while gradient.ndim > len(shape):
        gradient = sum_(gradient, 0)
    for dim, size in enumerate(shape):
        if size == 1 < gradient.shape[dim]:
            gradient = sum_(gradient, dim, keepdims=True)
    return gradient


def binary(function, left, right):
    """Return an operation of two arrays. left, right: the gradients of its operands, from (gradient, x, y)."""

    def apply(x, y):
        back = lambda g, x, y: (unbroadcast(left(g, x, y), x.shape), unbroadcast(right(g, x, y), y.shape))
        return local(function, x, y, pullback=back)

    return apply


def unary(function, slope):
    """Return an operation on each entry. slope: (x, function(x)) -> the derivative."""

    def entries(part):
        return np.array([function(x) for x in part.reshape(-1).tolist()]).reshape(part.shape)

    return lambda x: local(entries, x, pullback=lambda g, x: (g * slope(x, local(entries, x)),))


add = binary(operator.add, lambda g, x, y: g, lambda g, x, y: g)
subtract = binary(operator.sub, lambda g, x, y: g, lambda g, x, y: -g)
multiply = binary(operator.mul, lambda g, x, y: g * y, lambda g, x, y: g * x)
divide = binary(operator.truediv, lambda g, x, y: g / y, lambda g, x, y: -g * x / y**2)
power = binary(operator.pow, lambda g, x, y: g * y * x ** (y - 1), lambda g, x, y: g * x**y * log(x))
modulo = binary(operator.mod, lambda g, x, y: g, lambda g, x, y: -g * (x // y))
exp = unary(math.exp, lambda x, y: y)
log = unary(lambda x: math.log(x) if x > 0 else float("nan"), lambda x, y: 1 / x)
tanh = unary(math.tanh, lambda x, y: 1 - y**2)
sqrt = unary(math.sqrt, lambda x, y: 0.5 / y)
relu = lambda x: where(asarray(x) > 0, x, 0.0)
silu = lambda x: asarray(x) / (1 + exp(-asarray(x)))
gelu = lambda x: (
    0.5 * asarray(x) * (1 + tanh(0.7978845608 * (asarray(x) + 0.044715 * asarray(x) ** 3)))
)  # tanh, as JAX's
sign = lambda x: local(np.sign, x)
round_ = unary(round, lambda x, y: 0.0 * x)


def where(condition, x, y) -> Array:
    back = lambda g, c, x, y: (None, unbroadcast(where(c, g, 0.0), x.shape), unbroadcast(where(c, 0.0, g), y.shape))
    return local(np.where, condition, x, y, pullback=back)


def matmul(x, y) -> Array:
    x, y = asarray(x), asarray(y)
    if not x.ndim or not y.ndim or x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
        raise TypeError(
            f"dot_general requires contracting dimensions to have the same shape, got {x.shape} and {y.shape}"
        )
    if y.ndim == 1:
        return sum_(x * y, -1)
    if x.ndim != 2:
        rows = matmul(reshape(x, (-1, x.shape[-1])), y)
        return reshape(rows, (*x.shape[:-1], y.shape[-1]))
    return local(np.matmul, x, y, pullback=lambda g, x, y: (g @ y.T, x.T @ g))


def operators() -> None:
    """Give Array the operators of Python."""

    def forward(function):
        return lambda x, y: NotImplemented if y is None or isinstance(y, str | type(...)) else function(x, y)

    def backward(function):
        return lambda x, y: forward(lambda x, y: function(y, x))(x, y)

    arithmetic = {
        "add": add,
        "sub": subtract,
        "mul": multiply,
        "truediv": divide,
        "pow": power,
        "matmul": matmul,
        "mod": modulo,
    }
    without = lambda function: lambda x, y: local(function, x, y)  # a gradient
    compare = {name: without(getattr(operator, name)) for name in "lt le gt ge eq ne floordiv".split()}
    for name, function in (arithmetic | compare).items():
        setattr(Array, f"__{name}__", forward(function))
        setattr(Array, f"__r{name}__", backward(function))
    Array.__neg__ = lambda x: x * -1.0
    Array.__abs__ = lambda x: where(x < 0, -x, x)


operators()


# Sums and shapes ------------------------------------------------------------------------------------------------------


def along(function, x, axis: int | tuple[int, ...] | None, keepdims: bool, pullback=None) -> Array:
    """Reduce some dims, or all. pullback: (gradient with the dim kept, x) -> the gradient of x."""
    if isinstance(axis, tuple):
        for one in sorted((d % asarray(x).ndim for d in axis), reverse=True):
            x = along(function, x, one, keepdims, pullback)
        return x
    x = asarray(x) if axis is not None else reshape(x, (-1,))
    axis = (axis or 0) % max(x.ndim, 1)
    kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    back = pullback and (lambda g, x: (pullback(reshape(g, kept), x),))
    found = local(lambda part: function(part, axis), x, pullback=back)
    return reshape(found, kept) if keepdims else found


def sum_(x, axis=None, keepdims=False) -> Array:
    return along(lambda part, axis: part.sum(axis), x, axis, keepdims, lambda g, x: g * np.ones(x.shape))


def max_(x, axis=None, keepdims=False) -> Array:
    return along(lambda part, axis: part.max(axis), x, axis, keepdims)


def argmax(x, axis: int) -> Array:
    return local(lambda part: np.argmax(part, axis), x)


def mean(x, axis=None, keepdims=False) -> Array:
    found = sum_(x, axis, keepdims)
    return found * (found.size / asarray(x).size)


def reshape(x, shape) -> Array:
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    return local(lambda part: part.reshape(shape), x, pullback=lambda g, x: (reshape(g, x.shape),))


def transpose(x, axes=None) -> Array:
    x = asarray(x)
    axes = tuple(range(x.ndim))[::-1] if axes is None else tuple(axes)
    back = lambda g, x: (transpose(g, tuple(axes.index(d) for d in range(len(axes)))),)
    return local(lambda part: part.transpose(*axes), x, pullback=back) if x.ndim > 1 else x


def take(x: Array, key: tuple) -> Array:
    """x[key]. An entry of the key that is an Array is an index, which may differ between devices."""
    indices = [one for one in key if isinstance(one, Array)]

    def here(parts):
        parts = iter(parts)
        return tuple(int(number(next(parts))) if isinstance(one, Array) else one for one in key)

    def back(g, x, *indices):
        return local(lambda part, *own: placed(x.shape, here(own), part), g, *indices), *[None] * len(indices)

    return local(lambda part, *own: part[here(own)], x, *indices, pullback=back)


def placed(shape: tuple[int, ...], key: tuple, part):
    """Return zeros, with `part` at x[key]."""
    full = np.zeros(shape)
    full[key] = part
    return full


def dynamic_slice_in_dim(x, start, size: int, axis=0) -> Array:
    """As in JAX, a negative start counts from the end, and one that is too large is moved back."""
    x = asarray(x)
    length = x.shape[axis]

    def key(start):
        first = int(number(start))
        first = min(max(first + length * (first < 0), 0), length - size)
        return (*[slice(None)] * axis, slice(first, first + size))

    back = lambda g, x, start: (local(lambda part, own: placed(x.shape, key(own), part), g, start), None)
    return local(lambda part, own: part[key(own)], x, start, pullback=back)


def join(parts: list, axis: int):
    """Concatenate parts of one device."""
    return np.moveaxis(np.concatenate([np.moveaxis(part, axis, 0) for part in parts]), 0, axis)


def cut(part, n: int, axis: int) -> list:
    """Split a part into n. Raises: ValueError if it does not split."""
    if part.shape[axis] % n:
        raise ValueError(f"dim {axis} of an array of shape {part.shape} does not split over {n} devices")
    size = part.shape[axis] // n
    return [part[(*[slice(None)] * axis, slice(i * size, (i + 1) * size))] for i in range(n)]


def concatenate(arrays, axis=0) -> Array:
    arrays = [asarray(x) for x in arrays]
    axis %= arrays[0].ndim
    ends = [0, *itertools.accumulate(x.shape[axis] for x in arrays)]
    every = [slice(None)] * axis
    back = lambda g, *_: tuple(g[(*every, slice(start, end))] for start, end in itertools.pairwise(ends))
    return local(lambda *parts: join(parts, axis), *arrays, pullback=back)


def stack(arrays, axis=0) -> Array:
    arrays = [asarray(x) for x in arrays]
    return concatenate([reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in arrays], axis)


def split(x, parts: int, axis=0) -> list[Array]:
    size = asarray(x).shape[axis] // parts
    return [asarray(x)[(*[slice(None)] * axis, slice(i * size, (i + 1) * size))] for i in range(parts)]
