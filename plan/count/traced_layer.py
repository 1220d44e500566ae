"""Derive formulas for the FLOPs and bytes of one layer from its trace: forward, recomputation and backward.

`model.layer` is traced once for each kind of layer and each execution setting, with sizes that are distinct primes. So
the prime factors of a FLOP count, or of a collective's bytes, tell which sizes were multiplied, and this formula is
valid for all sizes and meshes. For example, `2 b t tensor D f` is a matmul over the positions of the TENSOR group.

The named scopes of the model tell what an operation is for, see MATMULS. A kernel (attention or the experts' matmuls)
is one row with the letters of its operands. Its FLOPs and bytes are those
that it declares, see `kernels/`.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import os
import pickle
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import encoder_decoder
import model
import utils
from architectures import declare
from config import ModelAtWork
from overlap.context import over_context
from overlap.remat import remat
from pipeline.step import BATCH_NAMES
from plan.chips import hardware
from plan.trace.program import abstract_mesh, read
from plan.trace.rows import COUNTED_ONCE, ROOT, Row
from sharding import AXES, BATCH, CONTEXT, FSDP, KERNELS_AS_CALLS, TENSOR, map_named, vary

# The letters are those of `model.py`'s legend; lower case is a local shard. In addition: r query heads per key head, k
# experts per token, x shared experts, and the sizes of the mesh axes tensor, context and expert. With a KV cache: S
# slots, s new tokens per sequence, and n tokens per device in the residual stream (all new tokens, padded, in equal
# shards).
# Rotary widths must be even, and CONTEXT splits positions into halves, so these sizes are twice a prime. Sums such as
# (K + R) have a prime factor that no letter has.
PRIMES = {
    "b": 11, "s": 107, "n": 79, "t": 2 * 13, "S": 83, "tensor": 3, "context": 5, "expert": 7, "k": 23, "e": 67, "X": 73,
    "D": 1009, "g": 37, "r": 101, "(r + 2)": 103, "K": 2 * 29, "(K + 1)": 59, "R": 2 * 53, "(K + R)": 58 + 106,
    "U": 193, "(U + 1)": 194, "Q": 71, "C": 127, "(C + R)": 127 + 106, "(Q + C + R)": 71 + 127 + 106,
    "(g (K + R) + C + R)": 37 * (58 + 106) + 127 + 106, "x": 61, "f": 47, "m": 89,
}  # fmt: skip
WIDE_LATENT = 1013  # width of a query latent that is too wide to be sent: see `model.sends_latents`
LETTER_OF = {max(p for p in range(3, value + 1) if value % p == 0 and all(p % q for q in range(2, p))): letter
             for letter, value in PRIMES.items()} | {WIDE_LATENT: "Q"}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A product of a coefficient and letters. A squared letter is listed twice."""

    coefficient: float
    letters: tuple[str, ...] = ()

    def at(self, sizes: dict):
        """Return the value for the given sizes of the letters, which may be of any type that supports `*`."""
        value = self.coefficient
        for letter in self.letters:
            value = value * sizes[letter]
        return value

    def __mul__(self, other: "Term") -> "Term":
        return Term(self.coefficient * other.coefficient, (*self.letters, *other.letters))

    def __str__(self) -> str:
        letters = sorted(self.letters, key=[*PRIMES, "(tensor - 1)", "(context - 1)"].index)
        return " ".join([f"{self.coefficient:g}"] * (self.coefficient != 1) + letters) or "1"


def term(value: float) -> Term:
    """Factor a number from a trace into letters. Raises: ValueError if a factor matches no letter."""
    left, coefficient, letters = round(value), round(value), []
    for prime, letter in LETTER_OF.items():
        while left and left % prime == 0:
            left, coefficient = left // prime, coefficient / (prime if prime == WIDE_LATENT else PRIMES[letter])
            letters.append(letter)
    if left & (left - 1):
        raise ValueError(f"{value:,.0f} has the factor {left}, which matches no letter in plan/count/traced_layer.py")
    return Term(coefficient, tuple(letters))


# The trace ------------------------------------------------------------------------------------------------------------

STACKS = "encoder", "decoder"  # kinds of layers of an encoder-decoder; those of a decoder are dense and moe


def prime_sized_model(c: ModelAtWork, kind: str) -> ModelAtWork:
    """Return a one-layer model with the same operations as a layer of `c`, and sizes from PRIMES."""
    is_moe = kind == "moe"
    n, heads, group = PRIMES, PRIMES["g"] * PRIMES[TENSOR], 1 if c.attention == "mla" else PRIMES["r"]
    if c.work.context_attention == "all_to_all":  # then CONTEXT also shards the heads, and g is one shard
        heads *= PRIMES[CONTEXT]
    query_latent = n["Q"] if model.sends_latents(c) else WIDE_LATENT
    positions = n["t"] * n["tensor"] * n["context"]
    sizes = dict(
        vocab_size=1, d_model=n["D"], n_layers=1, n_heads=heads * group, n_kv_heads=heads, d_head=n["K"],
        encoder_layers=int(kind in STACKS),
        d_rope=n["R"], d_value=n["U"], d_kv_latent=n["C"], d_query_latent=query_latent if c.d_query_latent else 0,
        rope_dims=0, rope_theta=1e4, rope_scaling="", no_rope_every=0, d_ff=n["f"] * n["tensor"],
        n_experts=n["e"] * n["expert"] * is_moe, top_k=n["k"], n_shared=n["x"] * bool(c.n_shared and is_moe),
        d_expert=n["m"] * n["tensor"], moe_every=1, dense_prefix=0, router="sigmoid", expert_groups=(1, 1),
        normalize_gates=True, routed_scaling=1.0, balance_loss=0.0, balance_rate=0.0, z_loss=0.0, label_smoothing=0.0,
        tie_embeddings=False, dropout=0.0, norm="sandwich" if c.norm == "sandwich" else "rms", norm_eps=1e-6,
        qk_norm=False, bias="", window="", softmax="", activation="swiglu" if model.gated(c) else "gelu",
        capacity_factor=bool(c.capacity_factor and is_moe) * n["X"] * n["e"] * n["expert"] / (n["k"] * positions),
    )  # fmt: skip
    work = replace(type(c.work)().resolved, remat=c.work.remat, tensor_exchange=c.work.tensor_exchange,
                   context_attention=c.work.context_attention, gather="step",
                   expert_exchange=c.work.expert_exchange if is_moe else "gathered")  # fmt: skip
    return replace(c, work=work, **sizes)


def whole_over_slices(spec: P) -> P:
    """Return a parameter's PartitionSpec after its all-gather over FSDP, as a layer expects it."""
    return P(*(None if FSDP in (entry if isinstance(entry, tuple) else (entry,)) else entry for entry in spec))


def gathered_layer(c: ModelAtWork, kind: str):
    """Return the shapes and PartitionSpecs of gathered parameters: those of a layer, as `model.layer` expects them, or
    of a model with one encoder layer and one decoder layer."""
    w = declare(c)
    if kind in STACKS:
        layer, stacked = w.replace(embedding_VD=None, norm_D=None, unembedding_DV=None), 0
    else:
        layer, stacked = (w.blocks.moe, 1) if kind == "moe" else (w.blocks.dense, 2)

    def shape(name, d):
        narrow = not d.exact and FSDP in str(d.spec)
        return jax.ShapeDtypeStruct(d.shape[stacked:], jnp.dtype(c.compute_dtype) if narrow else d.dtype)

    return map_named(shape, layer), jax.tree.map(lambda d: whole_over_slices(P(*d.spec[stacked:])), layer)


MESH = hardware.named_mesh({axis: PRIMES.get(axis, 1) for axis in AXES})


def read_rows(function, in_specs, *shapes) -> list[Row]:
    """Return the rows of a function that works on local shards, traced on a mesh with sizes from PRIMES."""
    on_mesh = jax.shard_map(function, in_specs=in_specs, out_specs=P(AXES))
    return read(on_mesh, *shapes, mesh=abstract_mesh(MESH, KERNELS_AS_CALLS)).rows


def rows(c: ModelAtWork, kind: str) -> list[Row]:
    """List all operations of one layer of a model from `prime_sized_model`, and of its backward pass."""
    if kind in STACKS:
        return stack_rows(c, kind)
    w, specs = gathered_layer(c, kind)
    B, T = PRIMES["b"] * PRIMES["expert"], PRIMES["t"] * PRIMES["tensor"] * PRIMES["context"]
    x_BTD = jax.ShapeDtypeStruct((B, T, c.d_model), jnp.dtype(c.compute_dtype))
    numbers_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def local(w, x_btD, positions_bs, segments_bs):
        batch = {"positions_BT": positions_bs, "segments_BT": segments_bs, "index_BT": positions_bs}
        attend = functools.partial(over_context, prefix_bs=positions_bs if c.prefix_lm else None)
        one = remat(c, lambda w, x_btD: model.layer(w, c, x_btD, model.tokens_of(batch), 0, None, attend)[0])
        y_btD, pull = jax.vjp(one, *vary((w, x_btD), AXES))
        return vary((y_btD, *pull(y_btD)), AXES)

    in_specs = specs, P(BATCH, (CONTEXT, TENSOR)), P(BATCH, CONTEXT), P(BATCH, CONTEXT)
    return read_rows(local, in_specs, w, x_BTD, numbers_BT, numbers_BT)


def stack_rows(c: ModelAtWork, kind: str) -> list[Row]:
    """List all operations of an encoder or a decoder of one layer, and of its backward pass."""
    w, specs = gathered_layer(c, kind)
    B, devices = PRIMES["b"] * PRIMES["expert"], PRIMES["tensor"] * PRIMES["context"]
    lengths = {"BS": PRIMES["t" if kind == "encoder" else "S"] * devices, "BT": PRIMES["t"] * devices}
    pair = tuple(jax.ShapeDtypeStruct((B, T, c.d_model), jnp.dtype(c.compute_dtype)) for T in lengths.values())
    names = (*BATCH_NAMES, *encoder_decoder.ENCODER_BATCH, "encoder_index_BS", "index_BT")
    batch = {name: jax.ShapeDtypeStruct((B, lengths[name[-2:]]), jnp.int32) for name in names}

    def local(w, pair, batch):
        one = lambda w, pair: encoder_decoder.stage(w, c, pair, batch, None, STACKS.index(kind))[0]
        pair, pull = jax.vjp(one, *vary((w, pair), AXES))
        return vary((pair, *pull(pair)), AXES)

    return read_rows(local, (specs, P(BATCH, (CONTEXT, TENSOR)), P(BATCH, CONTEXT)), w, pair, batch)


def cached_rows(c: ModelAtWork, kind: str) -> list[Row]:
    """List all operations of one layer in prefill and decode, where new tokens attend to a KV cache."""
    from generate import cache

    w, specs = gathered_layer(c, kind)
    size = PRIMES
    dtype, groups, devices = jnp.dtype(c.compute_dtype), size["expert"], size["context"] * size["tensor"]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    slots = groups * size["b"], size["S"] * size["context"]
    if c.attention == "mla":
        entries = cache.LatentCache(*(array(size["tensor"], *slots, width) for width in (c.d_kv_latent, c.d_rope)))
    else:
        entries = cache.GroupedCache(*[array(1, slots[0], c.n_kv_heads, slots[1], c.d_head)] * 2)
    x_1nD = array(groups, size["n"] * devices, c.d_model)
    numbers_1n = jax.ShapeDtypeStruct((groups, size["n"] * devices), jnp.int32)
    positions_bs = jax.ShapeDtypeStruct((groups * size["b"], size["s"]), jnp.int32)

    def local(w, entries, x_1nD, numbers_1n, positions_bs):
        batch = dict.fromkeys(("positions_BT", "segments_BT", "index_BT"), numbers_1n)
        attend = cache.CachedAttention(jax.tree.map(lambda x: x[0], entries), positions_bs)
        y_1nD, _ = model.layer(w, c, x_1nD, model.tokens_of(batch), 0, None, attend)
        return vary((y_1nD, attend.cache), AXES)

    in_specs = specs, cache.cache_spec(c), P(BATCH, (CONTEXT, TENSOR)), P(BATCH, CONTEXT), P(BATCH)
    return read_rows(local, in_specs, w, entries, x_1nD, numbers_1n, positions_bs)


# The named scopes of the model, by which the planner knows what an operation is for. Every matmul and kernel of a layer
# is in a scope of MATMULS. A scope of PART_OF gives the part of a plan; if an operation is in several, the first entry
# counts. TENSOR_EXCHANGE is around the code that a ring over TENSOR repeats for each chunk.
MATMULS = ("latents", "queries", "keys_values", "queries_keys_values", "attend", "attend_to_cache", "attention_output",
           "position_bias", "up", "gate", "down", "router", "experts")  # fmt: skip
PART_OF = {
    "attend_to_cache": "cache", "shared_experts": "shared experts", "router": "router", "experts": "experts",
    "logits": "logits", "feed_forward": "feed-forward", "attention": "attention", "cross_attention": "attention",
    "position_bias": "attention",
}  # fmt: skip
ENCODER_OUTPUT, TENSOR_EXCHANGE, RING_ALL_GATHER = "encoder_output", "tensor_exchange", "ring_all_gather"
SCOPES = {*MATMULS, *PART_OF, ENCODER_OUTPUT, TENSOR_EXCHANGE, RING_ALL_GATHER}


def scopes_of(row: Row) -> tuple[str, ...]:
    """Return the named scopes of the model that contain an operation, outermost first."""
    return tuple(dict.fromkeys(scope for scope in re.findall(r"\w+", row.scope) if scope in SCOPES))


def part_of(scopes: tuple[str, ...]) -> str:
    """Return the part of a plan that contains the operations in these scopes, or "other"."""
    return next((part for scope, part in PART_OF.items() if scope in scopes), "other")


# Rows in letters ------------------------------------------------------------------------------------------------------

TOKENS = {"b", "n"}  # letters that occur in activations but not in weights
BACKWARD_OF = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}  # collective in the backward pass


@dataclass(frozen=True)
class LayerRow:
    """One operation of a layer's forward pass, with the cost of its recomputation and of its gradient."""

    kind: str  # matmul, kernel, or a collective
    source: str  # "model.py:123 in hidden"
    scopes: tuple[str, ...]  # see `scopes_of`
    axes: tuple[str, ...]
    count: Term
    flops: Term  # per execution; see `dims` for kernels
    moved_bytes: tuple[Term, ...]  # bytes of operands and results, except an operand that the previous matmul has read
    payload: Term  # bytes of a collective's array; of the gathered array for an all-gather or reduce-scatter
    dims: tuple[tuple[Term, ...], ...]  # shapes of a kernel's operands
    recomputed: float  # number of recomputations in the backward pass
    backward: float  # matmul or kernel: backward FLOPs / forward FLOPs; collective: 1 if the backward pass has its dual

    @property
    def name(self) -> str:
        """The innermost scope of MATMULS; of a collective, the layer's branch."""
        return next((scope for scope in self.scopes[::-1] if scope in MATMULS), self.branch)

    @property
    def branch(self) -> str:
        """The outermost scope: attention, cross_attention or feed_forward, or what a stack computes once."""
        return self.scopes[0] if self.scopes else ""

    @property
    def once_per_stack(self) -> bool:
        """True if all layers of an encoder or of a decoder share the operation: position biases, encoder's output."""
        return self.branch in ("position_bias", ENCODER_OUTPUT)

    def hbm_bytes(self, sizes: dict):
        """Return the bytes that a forward pass reads and writes. In a ring, all chunks read the weights only once."""
        count = self.count.at(sizes)
        return sum(x.at(sizes) * (count if TOKENS & {*x.letters} else self.count.coefficient) for x in self.moved_bytes)

    @property
    def operands(self) -> list[tuple[Term, ...]]:
        """Shapes of a kernel's rows and weights, or of its queries, keys and values; of pairs, both parts."""
        fewest_dims = 3 if self.name == "attend" else 2  # documents and counts of rows, the next operands, have fewer
        return [*itertools.takewhile(lambda dims: len(dims) >= fewest_dims, self.dims)]

    @property
    def formula(self) -> str:
        """A matmul's FLOPs per forward pass, a collective's bytes, or a kernel's operand shapes, as text."""
        if self.dims:
            operands = (f"[{', '.join(map(str, dims))}]" for dims in self.operands)
            return f"{part_of(self.scopes)} of {' '.join(operands)}"
        return str(self.count * (self.payload if self.axes else self.flops))


def phase_of(row: Row) -> str:
    """Classify a row as forward pass ("forward"), recomputation ("again") or backward pass ("back")."""
    return "again" if "rematted_computation" in row.scope else "back" if "transpose(" in row.scope else "forward"


def count_term(row: Row) -> Term:
    """Return how often a row runs in a layer. A ring over TENSOR is unrolled: n matmuls and n - 1 permutes for n
    devices. A ring over CONTEXT is a loop of n - 1 iterations. The rounds of `overlap/experts.py` count once."""
    n, steps = PRIMES[TENSOR], PRIMES[CONTEXT] - 1
    if row.loop == COUNTED_ONCE:
        return Term(row.count)
    if row.loop:
        return Term(row.count / steps, ("(context - 1)",))
    if row.kind == "collective-permute" and row.axes == (TENSOR,):
        return Term(row.count / (n - 1), ("(tensor - 1)",))
    if row.count % n == 0 and TENSOR_EXCHANGE in scopes_of(row):
        return Term(row.count / n, (TENSOR,))
    return Term(row.count)


def payload(row: Row) -> float:
    """Compute the array's bytes from the bytes that a device sends; see the `Sends` lines in `sharding.py`."""
    n = math.prod(PRIMES[axis] for axis in row.axes)
    return row.wire_bytes / {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(row.kind, (n - 1) / n)


def symbolic_row(row: Row, again: float, back: float) -> LayerRow:
    """Convert a forward row to formulas. again, back: see `LayerRow.recomputed` and `LayerRow.backward`

    Raises: ValueError if a matmul or kernel is in no scope of MATMULS.
    """
    scopes = scopes_of(row)
    if not row.axes and not {*scopes} & {*MATMULS}:
        raise ValueError(f"{row.source}: this {row.kind} is in the named scopes {row.scope!r}, and none of them is in "
                         "MATMULS of plan/count/traced_layer.py")  # fmt: skip
    bytes_of = lambda shape, width: term(math.prod(shape) * width)
    return LayerRow(
        row.kind, row.source, scopes, row.axes, count_term(row), term(row.flops),
        tuple(bytes_of(*array) for array in row.arrays), term(payload(row)) if row.axes else Term(0),
        tuple(tuple(map(term, shape)) for shape, _ in row.arrays) if row.kind == "kernel" else (), again, back,
    )  # fmt: skip


def pop_executions(rows: list[Row], fits, most: float = math.inf) -> float:
    """Remove rows that satisfy `fits` until `most` executions are reached. Returns the number of their executions."""
    total = 0.0
    for row in [row for row in rows if fits(row)]:
        if total < most:
            total += row.count
            rows.remove(row)
    return total


@functools.cache
def layer_rows(c: ModelAtWork, kind: str) -> list[LayerRow]:
    """List the operations of one layer of `c`, in the order of its forward pass."""
    return cached_on_disk(prime_sized_model(c, kind), kind)


@functools.cache
def cached_layer_rows(c: ModelAtWork, kind: str) -> list[LayerRow]:
    """List the operations of one layer of `c` in prefill and decode, see `cached_rows`."""
    work = replace(c.work, remat="none", tensor_exchange=c.work.tensor_exchange, context_attention="gather")
    return cached_on_disk(prime_sized_model(replace(c, work=work), kind), kind, cached=True)


SOURCES = ("model.py", "rotary.py", "encoder_decoder.py", "sharding.py", "overlap/*.py", "kernels/*.py",
           "generate/cache.py", "plan/trace/rows.py", "plan/count/traced_layer.py")  # fmt: skip


@functools.cache
def code_hash() -> str:
    """Hash what the rows depend on besides the model's settings: the traced code, this code and the JAX version."""
    files = [file for pattern in SOURCES for file in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + jax.__version__.encode()).hexdigest()


def cache_file(c: ModelAtWork, kind: str, cached: bool = False) -> Path:
    name = hashlib.sha256(repr((code_hash(), c, c.work, kind, cached)).encode()).hexdigest()
    return Path(utils.cache_directory(), "layers", name)


@functools.cache
def cached_on_disk(c: ModelAtWork, kind: str, cached: bool = False) -> list[LayerRow]:
    """Return `from_trace(..)`, from the user's cache directory if it is there: a trace takes half a second."""
    file = cache_file(c, kind, cached)
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        return pickle.loads(file.read_bytes())
    result = from_trace(c, kind, cached)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            temporary.write(pickle.dumps(result))
        os.replace(temporary.name, file)
    return result


def from_trace(c: ModelAtWork, kind: str, cached: bool = False) -> list[LayerRow]:
    """Trace one layer of a model from `prime_sized_model` and combine each forward row with its backward rows.

    Raises: ValueError if a backward operation matches no forward operation.
    """
    every = cached_rows(c, kind) if cached else rows(c, kind)
    forward, again, back = ([row for row in every if phase_of(row) == one] for one in ("forward", "again", "back"))
    found = []
    for row in forward:
        same = lambda x, row=row: place(x) == place(row) and (x.kind, operands(x)) == (row.kind, operands(row))
        gradient = lambda x, row=row: place(x) == place(row) and is_gradient(x, row)
        repeated, twice = pop_executions(again, same), pop_executions(back, gradient, 2 * row.count)
        found.append(symbolic_row(row, repeated / row.count, twice / row.count))
    if again or back:
        raise ValueError(f"these backward operations match no operation of the layer's forward pass: {again + back}")
    return read_once(found)


def read_once(found: list[LayerRow]) -> list[LayerRow]:
    """Count an operand that consecutive matmuls share only once, because compilers merge these matmuls."""
    rows, operand = [], None
    for row in found:
        if row.kind == "matmul":
            same, operand = row.moved_bytes[0] == operand, row.moved_bytes[0]
            row = replace(row, moved_bytes=row.moved_bytes[same:])
        rows.append(row)
    return rows


def place(row: Row) -> tuple:
    """Return the key by which an operation's recomputation and gradient are found: they have the same key."""
    return row.source, row.axes, row.loop, scopes_of(row)


def operands(row: Row) -> tuple:
    """Return the arrays that distinguish the operations of one source line."""
    return row.arrays[:3] if row.kind == "kernel" else row.arrays


def is_gradient(x: Row, row: Row) -> bool:
    """Return True if x, from the same source line, is a backward operation of the forward operation `row`."""
    if row.kind == "kernel":
        return x.kind == "kernel" and operands(x) == operands(row)
    if row.axes:
        return (x.kind, x.wire_bytes) == (BACKWARD_OF.get(row.kind, row.kind), row.wire_bytes)
    return x.kind == "matmul" and x.flops == row.flops
