"""What one training step costs a device: FLOPs and bytes on the wire.

A layer's matmuls and collectives are read from its trace as formulas in letters (`traced_layer.py`), and evaluated here
for a model on a mesh. Written here are the embedding, the logits, and what is sent for each declared parameter. A row
says what the forward pass of one microbatch does once, and whether the backward pass does it again; `passes` says how
often each happens in a step. The rows are those of the busiest device, one of the first stage.
`python -m plan --compile` puts the compiler's counts beside them.

Letters are sizes and as in `model.py`: b sequences of a microbatch, s and t positions, h heads, f and m hidden widths
of this device.
"""

import functools
import math
from dataclasses import dataclass, replace

import model
import sharding
from config import AXES, Config, ModelAtWork
from kernels import attention as attending, grouped
from overlap.context import chunk_starts
from overlap.weights import tokens_go_to_table, vocabulary_slices
from pipeline import fit, schedules
from plan import hiding, traced_layer
from plan.hiding import WHOLE
from sharding import CONTEXT, EXPERT, FSDP, SLICED, STAGE, TENSOR

# Parameters and model FLOPs -------------------------------------------------------------------------------------------


def parameters(c: ModelAtWork) -> tuple[int, int]:
    """Count parameters: all of them, and those one token passes through (top_k of the n_experts routed ones).

    The selection bias is not counted: it is not trained by a gradient, and published counts leave it out.
    """
    every = declared(c).values()
    total = sum(d.size for d in every if d.trainable)
    routed = sum(d.size for d in every if d.trainable and "E" in d.dims and d.dims[-1] != "E")
    return total, total - routed + routed * c.top_k // max(c.n_experts, 1)


def model_flops_per_token(cfg: Config) -> int:
    """FLOPs of forward and backward for one token, multiply and add counted apart, recomputation not counted.

    6 per active parameter that multiplies (the embedding only looks up), and for attention 6 per pair of positions it
    may look at, on average (T + 1)/2, and per width of scores and values. Source: PaLM, arXiv:2204.02311, appendix B,
    with causal attention counted as causal.
    """
    c = cfg.at_work
    _, active = parameters(c)
    lookup = 0 if c.tie_embeddings else c.vocab_size * c.d_model
    width = c.d_head + c.d_rope + c.d_value if c.attention == "mla" else 2 * c.d_head
    return 6 * (active - lookup) + 3 * c.n_layers * c.n_heads * width * (cfg.data.seq_len + 1)


# What a device does ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """One device's share of one microbatch."""

    b: int  # sequences
    T: int  # positions of a sequence
    s: int  # positions attention asks for, those of all TENSOR neighbours
    t: int  # positions between blocks
    width: int  # bytes of an activation
    blocks: int  # repeating blocks of one stage
    mesh: dict[str, int]
    platform: str  # cpu, gpu or tpu: the grouped product has more than one form

    @classmethod
    def of(cls, cfg: Config, platform: str = "cpu") -> "Sizes":
        mesh, c = cfg.mesh.sizes, cfg.at_work
        s = cfg.data.seq_len // mesh[CONTEXT]
        width = 2 if c.compute_dtype == "bfloat16" else 4
        return cls(fit.split_batch(cfg).device_batch, cfg.data.seq_len, s, s // mesh[TENSOR], width,
                   c.n_blocks // mesh[STAGE], mesh, platform)  # fmt: skip

    def group(self, *axes: str) -> int:
        """Devices along some axes."""
        return math.prod(self.mesh[axis] for axis in axes)


BATCHED = (*WHOLE, "dots")  # "dots" keeps products without batch dims
ALWAYS = (*BATCHED, "none")


@dataclass(frozen=True)
class Product:
    """A matrix product of one layer's forward pass. `again`: remat policies under which it is repeated."""

    part: str
    flops: float
    hbm_bytes: float  # operands and results
    again: tuple[str, ...] = WHOLE
    back: tuple[float, float] | None = None  # the two of a backward pass; None: of one for inputs, and one for weights
    function: str = ""  # of the model that does it


@dataclass(frozen=True)
class Exchange:
    """A collective of one layer's forward pass."""

    part: str
    kind: str  # one of ledger.KINDS
    axes: tuple[str, ...]
    size: float  # bytes: of the joined array for a gather or scatter, of the array for the others
    again: tuple[str, ...] = BATCHED  # remat policies under which it is repeated
    back: float = 1  # gradients sent for each
    times: float = 1  # in one forward pass
    of: str = "layer"  # what it is for, as `waits` asks

    def wire_bytes(self, n: int) -> float:
        """What one of n devices sends in one execution."""
        return {"all-reduce": 2 * (n - 1) / n, "collective-permute": min(n - 1, 1)}.get(
            self.kind, (n - 1) / n
        ) * self.size


def grouped_rows(A: int, e: int, platform: str) -> int:
    """Rows that the grouped product of e experts multiplies for A assignments: it pads, or repeats parts of tiles."""
    return grouped.rows_multiplied(A, e) if platform == "tpu" else math.prod(grouped.padded_tiles(A, e))


def over_context(c: ModelAtWork, z: Sizes) -> str:
    """How keys of other devices are met: gather, ring or all_to_all."""
    return c.work.context_attention if z.mesh[CONTEXT] > 1 else "gather"


def letters(c: ModelAtWork, z: Sizes) -> dict:
    """The sizes of the letters in `traced_layer.PRIMES`, of one device."""
    tensor, context, heads = z.mesh[TENSOR], z.mesh[CONTEXT], c.n_heads if c.attention == "mla" else c.n_kv_heads
    found = {
        "tensor": tensor, "context": context, "expert": z.mesh[EXPERT], "(tensor - 1)": tensor - 1,
        "(context - 1)": context - 1, "b": z.b, "t": z.t, "D": c.d_model, "Q": c.d_query_latent, "C": c.d_kv_latent,
        "K": c.d_head, "R": c.d_rope, "U": c.d_value, "r": c.n_heads // heads, "f": c.d_ff // tensor,
        "m": c.d_expert // tensor, "x": c.n_shared, "e": c.n_experts // z.mesh[EXPERT], "k": c.top_k,
        "(K + R)": c.d_head + c.d_rope, "(Q + C + R)": c.d_query_latent + c.d_kv_latent + c.d_rope,
        "g": heads // tensor // (context if over_context(c, z) == "all_to_all" else 1),
    }  # fmt: skip
    return found | ({"X": model.slots_per_expert(c, z.T)} if c.capacity_factor else {})


def whole(x):
    """A number of positions or heads, which halves in a formula have made a float."""
    return int(x) if isinstance(x, float) else x


def attention(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes):
    """FLOPs and HBM bytes of attention, forward and backward, as `kernels.attention` declares them."""
    queries, keys = row.dims[0][1], row.dims[1][1]
    (b, s, h, K), (_, S, g, _), (*_, U) = ([whole(dim.at(sizes)) for dim in dims] for dims in row.dims[:3])
    if CONTEXT in keys.letters and CONTEXT not in queries.letters:
        starts = chunk_starts(s, z.mesh[CONTEXT])
    else:
        starts = ((0,),) if queries == keys else ((S,),)  # a ring's own keys, or those of another device: all earlier
    flops = attending.flops(s, S, starts, h, K, U, z.width, z.platform)
    moved = attending.hbm_bytes(s, S, starts, h, g, K, U, z.width, z.platform)
    ahead, back = zip(flops, moved, strict=True)
    if z.platform != "tpu" and row.again and z.T <= attending.BLOCK and z.mesh[CONTEXT] == 1:
        back = back[0] - 2 * h * K * s * S, back[1]  # of one block, scores made again are those of the backward pass
    return [b * x for x in ahead], [b * x for x in back]


def experts(row: traced_layer.LayerRow, sizes: dict, z: Sizes):
    """FLOPs and HBM bytes of a matmul of experts, forward: rows that a tile pads or repeats count."""
    (A, _), (e, D, M), *_ = ([whole(dim.at(sizes)) for dim in dims] for dims in row.dims)
    rows = grouped_rows(A, e, z.platform)
    return 2 * rows * D * M, (rows * D + e * D * M + rows * M) * z.width


def product(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes) -> Product:
    """A matmul or kernel of a layer, on one device."""
    count, back = row.count.at(sizes), None
    if traced_layer.KERNELS.get(row.kind) == "attention":
        ahead, back = attention(row, sizes, c, z)
    elif traced_layer.KERNELS.get(row.kind) == "experts":
        ahead = experts(row, sizes, z)
    else:
        ahead = row.flops.at(sizes), sum(moved.at(sizes) for moved in row.moved)
    once_more = max(row.again - 1, 0)  # a step of a ring is repeated, whatever the layer keeps
    if back is None and (once_more or row.back not in (1, 2)):
        back = [row.back * x for x in ahead]
    back = back and tuple(count * (y + once_more * x) for x, y in zip(ahead, back, strict=True))
    again = (c.work.remat,) if row.again else ()
    return Product(traced_layer.part_of(row), *(count * x for x in ahead), again, back, row.function)


def exchange(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork) -> Exchange:
    """A collective of a layer."""
    small, arrives = "D" not in row.payload.letters, row.kind == "all-gather" or "around" in row.callers
    if row.axes == (CONTEXT,):
        part = "heads" if row.kind == "all-to-all" else "keys"
    elif EXPERT in row.axes or "k" in row.payload.letters:
        part = "routes" if small else "tokens"
    else:
        part = "activations"
    of = "layer"
    if part == "activations" and arrives and "feed_forward_branch" in row.callers:
        of = "feed-forward"
    elif part == "activations" and not arrives and "attention_branch" in row.callers:
        of = "attention's sums"
    again = (c.work.remat,) if row.again else ()
    return Exchange(part, row.kind, row.axes, row.payload.at(sizes), again, row.back, row.count.at(sizes), of)


def layer(c: ModelAtWork, z: Sizes, is_moe: bool) -> list[Product | Exchange]:
    """Every matmul, kernel and collective of one layer, read from its trace, see `traced_layer`."""
    way = replace(c, work=replace(c.work, context_attention=over_context(c, z)))
    sizes = letters(c, z)
    return [
        exchange(row, sizes, c) if row.axes else product(row, sizes, c, z)
        for row in traced_layer.layer_rows(way, is_moe)
    ]


def tokens_go(c: ModelAtWork, z: Sizes) -> bool:
    return tokens_go_to_table(c, z.b * z.s, c.vocab_size // z.mesh[TENSOR])


def enter(c: ModelAtWork, z: Sizes):
    """The embedding: it looks up, and adds what TENSOR neighbours found."""
    yield Exchange("activations", "reduce-scatter", (TENSOR,), z.b * z.s * c.d_model * z.width, again=())
    if tokens_go(c, z):
        yield Exchange("routes", "all-gather", SLICED, 4 * z.b * z.s * z.group(*SLICED), again=(), back=False)
        yield Exchange("activations", "all-to-all", SLICED, z.b * z.t * c.d_model * z.width, again=())


def logits_tokens(z: Sizes) -> int:
    """Tokens of which a device makes its words' logits: a share on each stage."""
    return -(-z.b * z.t // z.mesh[STAGE]) * z.mesh[TENSOR]


def logits(c: ModelAtWork, z: Sizes):
    """Logits and loss, a share of the tokens on each stage."""
    n, tokens = z.mesh[TENSOR], logits_tokens(z)
    slices, words = vocabulary_slices(c, tokens, c.vocab_size // n)
    arrays = tokens * c.d_model + c.d_model * words + tokens * words
    one = Product("logits", 2 * tokens * c.d_model * words, arrays * z.width)
    yield replace(one, flops=(slices - 1) * one.flops, hbm_bytes=(slices - 1) * one.hbm_bytes, again=ALWAYS)
    yield replace(one, again=())  # the last slice's, the backward pass finds made
    X = tokens * c.d_model * z.width
    yield Exchange("activations", "reduce-scatter", (STAGE,), X // n * z.mesh[STAGE], again=())
    yield Exchange("activations", "all-gather", (TENSOR,), X, again=())
    yield Exchange("logits", "all-reduce", (TENSOR,), 3 * 4 * tokens, again=(), back=False)  # largest, sum, target's


# How often ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """How often a step does each thing, all microbatches together."""

    forward: int  # forward passes
    again: int  # times a backward pass repeats what it needs of the forward pass
    inputs: int  # gradients of inputs
    weights: int  # gradients of weights


def passes(cfg: Config, sched: schedules.Schedule) -> Passes:
    """How often the layers of a stage are passed.

    The balance loss costs one more forward pass, unless all forward passes come before the first backward pass. Where
    weight gradients wait, both halves of a backward pass repeat what they need, and both pass the layers.
    """
    c, M = cfg.at_work, sched.microbatches
    once_more = M * sched.stages > 1 and not sched.turns and c.n_experts and c.balance_loss
    halves = 1 + sched.splits_backward
    return Passes(M * (2 if once_more else 1), M * halves, M * halves, M)


def layers(c: ModelAtWork, z: Sizes) -> list[tuple[int, list]]:
    """(how many, rows of one) of each kind of layer on the first stage."""
    n_moe = z.blocks if c.n_experts else 0
    n_dense = c.dense_prefix + z.blocks * (c.layers_per_block - bool(c.n_experts))
    return [(many, layer(c, z, bool(is_moe)) if many else []) for is_moe, many in enumerate((n_dense, n_moe))]


@dataclass(frozen=True)
class Work:
    """What one product does in a step, recomputation included."""

    part: str
    flops: float
    hbm_bytes: float


def work(cfg: Config, sched: schedules.Schedule, platform: str = "cpu") -> list[Work]:
    """Every product of one device's step."""
    c, z, once, run = cfg.at_work, Sizes.of(cfg, platform), Passes(*(sched.microbatches,) * 4), passes(cfg, sched)

    def count(row: Product, many: int, run: Passes) -> Work:
        ahead = run.forward + run.again * (c.work.remat in row.again)
        both = zip((row.flops, row.hbm_bytes), row.back or (None, None), strict=True)
        back = lambda x, given: x * (run.inputs + run.weights) if given is None else given * run.inputs
        return Work(row.part, *(many * (ahead * x + back(x, given)) for x, given in both))

    rows = [(row, many, run) for many, found in layers(c, z) for row in found] + [
        (row, 1, once) for row in logits(c, z)
    ]
    return [count(*one) for one in rows if isinstance(one[0], Product)]


@dataclass(frozen=True)
class Weights:
    """One parameter, as a device of the first stage has it."""

    name: str
    d: sharding.Declaration
    mesh: dict[str, int]
    c: ModelAtWork

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The mesh axes that split each dim."""
        return [(entry,) if isinstance(entry, str) else entry or () for entry in self.d.spec]

    @property
    def held(self) -> int:
        """Entries of the slice a device keeps."""
        return self.d.size // math.prod(self.mesh[axis] for axes in self.axes for axis in axes)

    @property
    def gathered_over(self) -> tuple[str, ...]:
        return next((axes for axes in self.axes if FSDP in axes), ())

    @property
    def parts(self) -> int:
        """Devices whose slices are joined."""
        return math.prod(self.mesh[axis] for axis in self.gathered_over)

    @property
    def slice(self) -> int:
        """How wide a slice is, along the dim that is gathered."""
        found = [size for size, axes in zip(self.d.shape, self.axes, strict=True) if FSDP in axes]
        return found[0] // self.parts if found else 0

    @property
    def joined(self) -> int:
        """Entries of what products use."""
        return self.held * self.parts

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes along which every device has the same."""
        return tuple(axis for axis in AXES if not any(axis in axes for axes in self.axes))

    @property
    def width(self) -> int:
        """Bytes of an entry in use."""
        narrow = self.gathered_over and not self.d.exact and self.c.compute_dtype == "bfloat16"
        return 2 if narrow else self.d.dtype.itemsize

    @property
    def layers(self) -> int:
        """Layers of one stage that have one."""
        sizes = dict(zip(self.d.dims, self.d.shape, strict=True))
        stages = self.mesh[STAGE] if "L" in sizes else 1
        return math.prod(sizes.get(letter, 1) for letter in "PLJ") // stages


@functools.cache
def declared(c: ModelAtWork) -> dict[str, sharding.Declaration]:
    return sharding.named(model.declare(c))


def weights(cfg: Config) -> list[Weights]:
    sizes = cfg.mesh.sizes
    return [Weights(name, d, sizes, cfg.at_work) for name, d in declared(cfg.model).items()]


@dataclass(frozen=True)
class Traffic:
    """What one device sends in a step for one purpose."""

    part: str
    kind: str
    axes: tuple[str, ...]  # of more than one device
    count: float
    wire_bytes: float
    exposed_bytes: float  # of those it waits for: no products stand beside
    in_a_slot: bool  # each microbatch does it, and other stages wait for the slowest


def traffic(cfg: Config, sched: schedules.Schedule, platform: str = "cpu", chip: str = "") -> list[Traffic]:
    """Everything one device sends in a step, but for a few numbers (counts, norms, metrics)."""
    c, z, run = cfg.at_work, Sizes.of(cfg, platform), passes(cfg, sched)
    once, found = Passes(*(sched.microbatches,) * 4), {}

    def add(part, kind, axes, size, count, when="once", of=""):
        axes = tuple(axis for axis in AXES if axis in axes and z.mesh[axis] > 1)
        kind = hiding.made_of(kind, axes, z.mesh, platform)
        if axes and count and size:
            wire = count * Exchange(part, kind, axes, size).wire_bytes(z.group(*axes))
            waits = wire * hiding.exposed(c, z.mesh, chip, kind, axes, when, of)
            old = found.get((part, kind, axes), (0, 0, 0))
            found[part, kind, axes] = old[0] + count, old[1] + wire, old[2] + waits

    def activations(rows, many: int, run: Passes, inside=True):
        for row in rows:
            if isinstance(row, Exchange):
                one = (row.axes, row.size)
                more = lambda when, of=row.of: (when, of) if inside else ()
                times = many * row.times
                add(row.part, row.kind, *one, times * run.forward, *more("forward"))
                add(row.part, row.kind, *one, times * run.again * (c.work.remat in row.again), *more("again"))
                back = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}.get(row.kind, row.kind)
                add(row.part, back, *one, times * run.inputs * row.back, *more("back"))

    for many, rows in layers(c, z):
        activations(rows, many, run)
    activations(enter(c, z), 1, Passes(run.forward, 0, sched.microbatches, 0), inside=False)
    activations(logits(c, z), 1, once, inside=False)
    ahead = schedules.forward_only(sched) if run.forward > sched.microbatches else None
    ticks = len(sched.table) * (1 if sched.turns else 2) + (len(ahead.table) if ahead else 0)
    if sched.stages > 1:
        add("activations", "collective-permute", (STAGE,), z.b * z.t * c.d_model * z.width, ticks)
    if c.n_experts:
        add("statistics", "all-reduce", sharding.TOKENS, 4 * (2 * c.n_experts + 3) * z.blocks, 1)
    parts = fit.split_batch(cfg)
    sequences = parts.device_batch * parts.microbatches * parts.accumulation
    add("batch", "all-gather", (CONTEXT,), 6 * 4 * sequences * z.T, 1)
    for w in weights(cfg):
        of_weights(w, cfg, sched, add, platform)
    rare = {"batch", "replicas"} | ({"weights", "gradients"} if c.work.gather == "step" else set())
    return [Traffic(*key, *value, key[0] not in rare and STAGE not in key[2]) for key, value in found.items()]


@dataclass(frozen=True)
class Use:
    """A parameter, or pieces of it, that are joined for products."""

    ahead: int  # forward passes of a step that do
    again: int  # repeated ones
    back: int  # gradients
    dims: str
    size: float  # entries of one piece, joined
    times: float  # pieces
    of: str = ""  # what for, as `hiding.exposed` asks


def uses(w: Weights, cfg: Config, sched: schedules.Schedule):
    """Each use of a parameter: of each layer, or once a step."""
    c, z, M, run = cfg.at_work, Sizes.of(cfg), sched.microbatches, passes(cfg, sched)
    if c.work.gather == "step":
        yield Use(1, 0, 1, w.d.dims, w.joined / w.layers, w.layers)
        return
    if w.name.startswith(("prefix.", "blocks.")):
        of = "experts" if "E" in w.d.dims else "weights"
        yield Use(run.forward, run.again, run.weights, w.d.dims, w.joined / w.layers, w.layers, of)
    if w.name == "embedding_VD" and not tokens_go(c, z):
        yield Use(run.forward, 0, M, w.d.dims, w.joined, 1)
    if w.name == ("embedding_VD" if c.tie_embeddings else "unembedding_DV"):
        v = c.vocab_size // z.mesh[TENSOR]
        slices, words = vocabulary_slices(c, logits_tokens(z), v)
        yield Use(M, 0, M, "DV", w.joined / v * words, slices - 1, "vocabulary")
        yield Use(M, 0, M, "DV", w.joined / v * words, 1)  # the first one, and the last gradient: nothing is beside


def of_weights(w: Weights, cfg: Config, sched: schedules.Schedule, add, platform: str) -> None:
    """Add what is sent for one parameter: its slices, its gradients."""
    once, M = cfg.at_work.work.gather == "step", sched.microbatches
    for use in uses(w, cfg, sched):
        size = use.size * w.width
        add("weights", "all-gather", w.gathered_over, size, use.ahead * use.times, "forward", use.of)
        add("weights", "all-gather", w.gathered_over, size, use.again * use.times, "again", use.of)
        if not w.d.trainable:
            continue
        if once and M * sched.stages > 1:  # added up in float32 before
            size = 4 * use.size
        kind = "reduce-scatter" if once else hiding.scatter_of(use.dims, w.slice, platform)  # of a layer's alone
        add("gradients", kind, w.gathered_over, size, use.back * use.times, "back", use.of)
    if w.d.trainable:
        add("replicas", "all-reduce", w.replicas, w.held * w.d.dtype.itemsize, 1)
    if sched.chunks > 1 and w.d.dims[0] == "L":  # to the stages that interleaving puts them on, and back
        held = (w.joined if cfg.at_work.work.gather == "step" else w.held) / sched.chunks
        rounds = sum(any(a != b for a, _, b, _ in r) for r in schedules.routes(sched.stages, sched.chunks))
        add("weights", "collective-permute", (STAGE,), held * w.width, rounds)
        add("gradients", "collective-permute", (STAGE,), held * 4, rounds)


# Waiting --------------------------------------------------------------------------------------------------------------


def slots(cfg: Config, sched: schedules.Schedule) -> tuple[float, float, float]:
    """Cost of a forward slot, a backward slot and a weight slot, in forward passes of a stage."""
    c = cfg.at_work
    again = (
        1.0 if c.work.remat in WHOLE else {"none": 0.0, "dots": 0.2}[c.work.remat]
    )  # "dots": scores, and the experts
    return (1.0, again + 1, again + 2) if sched.splits_backward else (1.0, again + 2, 0.0)


def bubble(cfg: Config, sched: schedules.Schedule) -> float:
    """Share of the time of the layers that a stage waits for others: all wait for the slowest after every tick."""
    F, B, W = slots(cfg, sched)
    busy, whole = sched.microbatches * (F + B + W), schedules.lock_step(sched, F, B, W)
    if passes(cfg, sched).forward > sched.microbatches:
        busy, whole = busy + sched.microbatches * F, whole + schedules.lock_step(schedules.forward_only(sched), F)
    return max(1 - busy / whole, 0.0)  # rounding
