"""Count the FLOPs of one device in one training step, and the bytes that it sends.

A layer's matmuls and collectives are read from its trace as formulas in letters (`traced_layer.py`), and evaluated here
for a model on a mesh. The embedding, the logits, and the collectives of each declared parameter are written here. A
row (`Matmul` or `Collective`) is the cost of one operation in one forward pass of one microbatch, and says whether the
backward pass repeats it. `passes` counts how often it runs in a step. The rows describe the busiest device, which is in
the first stage. `python -m plan --compile` compares them with the compiler's counts.

Letters are sizes as in the legend of `model.py`; lower case is one device's shard: b sequences of a microbatch, s and t
positions, h heads, f and m hidden widths.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace

import model
import sharding
from architectures import architecture, busiest_stage
from config import Config, ModelAtWork, ModelConfig
from config.fields import parse_bias, parse_outer, parse_pipeline, parse_window
from kernels import attention as attending, grouped, masked
from kernels.blocks import Reach, in_lanes
from overlap import experts
from overlap.context import chunk_starts, ring_sends_halo
from overlap.weights import tokens_go_to_table, vocabulary_slices
from parameters import as_stored
from pipeline import fit, schedules
from plan.chips import hiding
from plan.count import matrices, networks, traced_layer
from plan.count.networks import Collective, Traffic
from plan.count.weights import LAYERS, Weights, declared, weights
from sharding import CONTEXT, DATA, EXPERT, SLICED, STAGE, TENSOR

# Parameters and model FLOPs -------------------------------------------------------------------------------------------


def parameters(c: ModelAtWork) -> tuple[int, int]:
    """Count all parameters, and those active for one token (top_k of the n_experts routed experts).

    The router's selection bias is not counted, because no gradient trains it and published counts omit it.
    """
    every = declared(c).values()
    total = sum(d.size for d in every if d.trainable)
    routed = sum(d.size for d in every if d.trainable and "E" in d.dims and d.dims[-1] != "E")
    return total, total - routed + routed * c.top_k // (c.n_experts or 1)


def model_flops_per_token(cfg: Config) -> int:
    """Return the FLOPs of forward and backward pass for one token, without recomputation. A multiply-add counts as 2.

    Each active parameter of a matmul costs 6 (the embedding is only a lookup). Attention costs 6 * (width of scores +
    width of values) per head and position that a token can attend to, on average (T + 1)/2 of T = seq_len positions.
    With an encoder, a sequence has S = input_len inputs and T targets, and both count as tokens. Inputs pass through
    the encoder and the keys and values of cross-attention, and targets through the rest.
    Source: PaLM, arXiv:2204.02311, appendix B, but with half the query-key pairs, because attention is causal.
    """
    c, S, T = cfg.at_work, cfg.data.input_len, cfg.data.seq_len
    _, active = parameters(cfg.model)
    lookup = 0 if c.tie_embeddings else c.vocab_size * c.d_model
    width = c.d_head + c.d_rope + c.d_value if c.attention == "mla" else 2 * c.d_head
    of_inputs = "encoder.", "decoder.layers.cross.w_key", "decoder.layers.cross.w_value"
    inputs = sum(d.size for name, d in declared(cfg.model).items() if name.startswith(of_inputs))
    pairs = 2 * c.encoder_layers * S * S + c.n_layers * (int(T * (T + 1) * share_in_windows(cfg)) + 2 * S * T)
    return (6 * (inputs * S + (active - lookup - inputs) * T) + 3 * c.n_heads * width * pairs) // (S + T)


def share_in_windows(cfg: Config) -> float:
    """Return which fraction of the causal query-key pairs are inside sliding windows: the mean over the layers."""
    T, W = cfg.data.seq_len, min(parse_window(cfg.model.window).size, cfg.data.seq_len)
    return 1 - windowed_share(cfg.model) * (1 - W * (2 * T - W + 1) / (T * (T + 1)))


def windowed_share(c: ModelConfig) -> float:
    """Return the fraction of the layers that have a sliding window."""
    size, every, _ = parse_window(c.window)
    return 1 - c.n_layers // every / c.n_layers if every else float(size > 0)


# What a device does ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes of one device's shard of one microbatch."""

    b: int  # sequences
    T: int  # positions of a whole sequence
    s: int  # positions in attention: those of the whole TENSOR group
    t: int  # positions in the residual stream
    width: int  # bytes per number in an activation
    blocks: int  # blocks of layers in one stage
    mesh: dict[str, int]
    platform: str  # cpu, gpu or tpu, which have different grouped matmuls
    S: int = 0  # positions of a whole sequence in an encoder

    @classmethod
    def from_config(cls, cfg: Config, platform: str = "cpu") -> "Sizes":
        mesh, c = cfg.mesh.sizes, cfg.at_work
        s = cfg.data.seq_len // mesh[CONTEXT]
        width = 2 if c.compute_dtype == "bfloat16" else 4
        return cls(fit.split_batch(cfg).device_batch, cfg.data.seq_len, s, s // mesh[TENSOR], width,
                   c.n_blocks // mesh[STAGE], mesh, platform, cfg.data.input_len)  # fmt: skip

    @property
    def of_encoder(self) -> "Sizes":
        """The sizes of the encoder's shard, which are used where those of the decoder are expected."""
        return replace(self, T=self.S, s=self.S, t=self.S // self.mesh[TENSOR])

    @property
    def streams(self) -> list["Sizes"]:
        """The sizes of each residual stream."""
        return [self, self.of_encoder] if self.S else [self]

    def group(self, *axes: str) -> int:
        """Number of devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)


@dataclass(frozen=True)
class Matmul:
    """A matmul in one layer's forward pass."""

    part: str
    flops: float
    hbm_bytes: float  # operands and results
    again: bool = True  # recomputed for the backward pass
    back: tuple[float, float] | None = None  # FLOPs and bytes backward; None: one matmul for inputs, one for weights
    branch: str = ""  # of the layer, and the name of the matmul: see `traced_layer.LayerRow`
    name: str = ""
    kernel: str = ""  # attention or experts; empty: a plain matmul


def grouped_rows(A: int, e: int, platform: str) -> int:
    """Return how many rows the grouped matmul of e experts computes for A assignments, with padding and repetition."""
    return grouped.rows_multiplied(A, e) if platform == "tpu" else math.prod(grouped.padded_tiles(A, e))


def expert_exchange(c: ModelAtWork, z: Sizes) -> str:
    """Return how tokens reach dropless experts: gathered or routed."""
    return "routed" if experts.is_routed(c, z.mesh[EXPERT]) else "gathered"


def expert_rows(c: ModelAtWork, z: Sizes) -> tuple[int, int]:
    """Return the rows of the arrays of an MoE layer's experts on a device, and how many of them have an expert there.

    A row is a token with one of its experts. Dropless experts have as many as if the load of all devices along EXPERT
    were equal. The arrays have room for all tokens of the group (gathered), or for one round with its SPARE (routed).
    """
    N, n = z.b * z.s, z.mesh[EXPERT]
    if c.capacity_factor:
        return (c.n_experts * z.b * model.slots_per_expert(c, z.T),) * 2
    rows = experts.round_arrays(c, N, n)[1] if expert_exchange(c, z) == "routed" else n * N * c.top_k
    return rows, N * c.top_k


def received_tokens(c: ModelAtWork, z: Sizes) -> int:
    """Return for how many tokens routed experts have room on a device, in one round; gathered experts: 0."""
    n = z.mesh[EXPERT]
    return n * experts.round_arrays(c, z.b * z.s, n)[0] if expert_exchange(c, z) == "routed" else 0


def context_exchange(c: ModelAtWork, z: Sizes) -> str:
    """Return the form of attention over CONTEXT of a layer of `layer_groups`: gather, all_to_all, ring, or halo, if a
    ring sends only the positions in windows."""
    form = c.work.context_attention if z.mesh[CONTEXT] > 1 else "gather"
    if form == "ring" and c.window:
        return "halo" if ring_sends_halo(parse_window(c.window).size, z.s, z.mesh[CONTEXT]) else "gather"
    return form


def attended_chunks(c: ModelAtWork, z: Sizes) -> float:
    """Return how many times its own positions a device attends to, if it has their keys at once."""
    if context_exchange(c, z) == "halo":
        return 1 + 2 * parse_window(c.window).size / z.s
    return z.mesh[CONTEXT]


def letters(c: ModelAtWork, z: Sizes) -> dict:
    """Return the sizes, on one device, of the letters in `traced_layer.PRIMES`."""
    tensor, context, heads = z.mesh[TENSOR], attended_chunks(c, z), c.n_heads if c.attention == "mla" else c.n_kv_heads
    found = {
        "tensor": tensor, "context": context, "expert": z.mesh[EXPERT], "(tensor - 1)": tensor - 1,
        "(context - 1)": context - 1, "b": z.b, "t": z.t, "D": c.d_model, "Q": c.d_query_latent, "C": c.d_kv_latent,
        "S": z.S // tensor, "K": c.d_head, "R": c.d_rope, "U": c.d_value, "r": c.n_heads // heads,
        "f": c.d_ff // tensor, "m": c.d_expert // tensor, "x": c.n_shared, "e": c.n_experts // z.mesh[EXPERT],
        "k": c.top_k,
        "(K + R)": c.d_head + c.d_rope, "(Q + C + R)": c.d_query_latent + c.d_kv_latent + c.d_rope,
        "g": heads // tensor // (context if context_exchange(c, z) == "all_to_all" else 1),
    }  # fmt: skip
    return found | ({"X": model.slots_per_expert(c, z.T)} if c.capacity_factor else {})


def as_int(x):
    """Convert a number of positions or heads back to int, after halves in a formula made it a float."""
    return round(x) if isinstance(x, float) else x


visits = functools.cache(attending.count_visits)


def attention_cost(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes):
    """Return (FLOPs, HBM bytes) of attention, forward and backward, as `kernels.attention` declares them."""
    *parts, values = row.operands
    queries, keys = parts[0][1], values[1]
    (b, s, h, K), *more, (_, S, g, U) = ([as_int(dim.at(sizes)) for dim in dims] for dims in (*parts, values))
    K, R = (K + more[0][-1], more[0][-1]) if len(more) > 1 else (K, 0)
    window = parse_window(c.window).size
    if context_exchange(c, z) == "halo":  # a device's two chunks are like two sequences
        b, s, S, starts = 2 * b, s // 2, S // 2, ((window,),)
    elif CONTEXT in keys.letters and CONTEXT not in queries.letters:
        starts = chunk_starts(s, z.mesh[CONTEXT])
    else:  # in a ring, the keys of another device all precede the queries
        starts = ((0,),) if queries == keys else ((S,),)
    counted = visits(s, S, Reach(starts, window), in_lanes(K), in_lanes(U), z.width, z.platform)
    moved = attending.hbm_bytes(counted, s, S, h, g, K, U, z.width, R)
    ahead, back = zip(attending.flops(counted, h, K, U), moved, strict=True)
    if z.platform != "tpu" and row.recomputed and z.T <= attending.BLOCK and z.mesh[CONTEXT] == 1:
        # With a single block, XLA merges the recomputed scores with those that the backward pass computes.
        back = back[0] - 2 * h * K * s * S, back[1]
    return [b * x for x in ahead], [b * x for x in back]


def masked_keys(z: Sizes, branch: str) -> int:
    """Return to how many keys a device's queries attend with a mask, in a branch of a layer."""
    return z.S if branch == "cross_attention" else z.T


def scores_in_kernel(c: ModelAtWork, z: Sizes, branch: str) -> int:
    """Return how many scores of a head a TPU's kernel of attention with a mask computes; 0 if there is no kernel."""
    width = c.d_head + c.d_rope + c.d_value if c.attention == "mla" else 2 * c.d_head
    return masked.count_scores(z.s, masked_keys(z, branch), width) if z.platform == "tpu" else 0


def masked_attention_cost(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes):
    """Return FLOPs and HBM bytes of one of the two matmuls of attention with a mask in a kernel, forward and backward.

    The kernel reads a byte of the mask per score of a head, and biases once for all sequences. Its backward pass
    computes the scores again.
    """
    flops, keys = row.count.at(sizes) * row.flops.at(sizes), masked_keys(z, row.branch)
    entries = c.n_heads // z.mesh[TENSOR] * z.s * keys
    moved = flops / (2 * z.s * keys) * (z.s + keys) * z.width  # queries and keys, or values and results
    scores = entries * (z.b + 4 * bool(z.S and row.branch == "attention")) / 2
    flops *= scores_in_kernel(c, z, row.branch) / (z.s * keys)
    gives_scores = not {"K", "U"} & {*row.moved_bytes[-1].letters}  # the other matmul has a head's results
    return (flops, moved + scores), ((2 + gives_scores) * flops, 2 * moved + scores)


def expert_matmul_cost(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes):
    """Return FLOPs and HBM bytes of an expert matmul, forward, including the rows that a tile pads or repeats. On a CPU
    it also computes rows without an expert."""
    _, (e, D, M), *_ = ([as_int(dim.at(sizes)) for dim in dims] for dims in row.dims)
    rows = grouped_rows(expert_rows(c, z)[z.platform != "cpu"], e, z.platform)
    of_bias = expert_rows(c, z)[0] * e if "experts" in parse_bias(c.bias) else 0  # `overlap.experts.bias_of_rows`
    return 2 * (rows * D + of_bias) * M, (rows * D + e * D * M + rows * M) * z.width


def matmul_cost(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes) -> Matmul:
    """Return the cost of a matmul or kernel of a layer on one device."""
    count, back, kernel, part = row.count.at(sizes), None, "", traced_layer.part_of(row.scopes)
    if row.kind == "matmul" and row.name == "attend" and scores_in_kernel(c, z, row.branch):
        ahead, back = masked_attention_cost(row, sizes, c, z)
        return Matmul(part, *ahead, c.work.remat != "none", back, row.branch, row.name, "attention")
    if row.kind == "kernel" and row.name == "attend":
        kernel, (ahead, back) = "attention", ([count * x for x in one] for one in attention_cost(row, sizes, c, z))
    elif row.kind == "kernel":
        kernel = "experts"
        ahead = [count * x for x in expert_matmul_cost(row, sizes, c, z)]
        if row.backward == 2:  # routed experts compute it again, whatever the layer saves
            back = [3 * x for x in ahead]
    else:
        ahead = [count * row.flops.at(sizes), row.hbm_bytes(sizes)]
    # A ring over CONTEXT recomputes each step, whatever the layer saves. So does attention with a mask, but XLA merges
    # the second time that it computes the scores with the first, if not on a TPU.
    with_mask = row.kind == "matmul" and row.name == "attend"
    once_more = max(row.recomputed - 1, 0) * (z.platform == "tpu" or not with_mask)
    if back is None and (once_more or row.backward not in (1, 2) or row.once_per_stack):
        back = [row.backward * x for x in ahead]
    back = back and tuple(y + once_more * x for x, y in zip(ahead, back, strict=True))
    return Matmul(part, *ahead, bool(row.recomputed), back, row.branch, row.name, kernel)


def collective_cost(row: traced_layer.LayerRow, sizes: dict, c: ModelAtWork, z: Sizes) -> Collective:
    """Return the cost of a collective of a layer."""
    size, n = row.payload.at(sizes), z.mesh[EXPERT]
    if row.axes == (EXPERT,) and row.kind == "all-to-all" and not c.capacity_factor:  # traced as if it sent all tokens
        size = size * experts.round_sizes(c, z.b * z.s, n)[0] // (z.b * z.s)
    small = "D" not in row.payload.letters
    arrives = row.kind == "all-gather" or traced_layer.RING_ALL_GATHER in row.scopes
    if row.axes == (CONTEXT,):
        part = "heads" if row.kind == "all-to-all" else "keys"
    elif EXPERT in row.axes or "k" in row.payload.letters:
        part = "routes" if small else "tokens"
    else:
        part = "activations"
    of, kind, count = "layer", row.kind, row.count.at(sizes)
    if part == "keys" and context_exchange(c, z) == "halo":
        kind, positions = "collective-permute", halo_permutes(parse_window(c.window).size, z.s // 2)
        size, count = size / (sizes["context"] * z.s) * sum(positions) / len(positions), count * len(positions)
    if part == "activations" and arrives and row.branch == "feed_forward":
        of = "feed-forward"
    elif part == "activations" and not arrives and row.branch in ("attention", "cross_attention"):
        of = "attention's sums"
    return Collective(kind, row.axes, size, count, part, back=row.backward, of=of, again=bool(row.recomputed),
                      branch=row.branch, arrives=arrives)  # fmt: skip


def halo_permutes(window: int, chunk: int) -> list[int]:
    """Return the positions in each collective-permute of `halo_attention`. `chunks_before` has two for the next chunk,
    and three for each chunk further away, of which a device uses two."""
    return [min(window - start, chunk) for start in range(0, window, chunk) for _ in range(3 if start else 2)]


@functools.cache
def with_forms(c: ModelAtWork, attention: str, exchange: str) -> ModelAtWork:
    return replace(c, work=replace(c.work, context_attention=attention, expert_exchange=exchange))


def layer_costs(c: ModelAtWork, z: Sizes, kind: str, shared: bool = False) -> list[Matmul | Collective]:
    """List every matmul, kernel and collective of one layer, read from its trace; see `traced_layer`.

    shared  list those that all layers of an encoder or a decoder share instead
    """
    z = z.of_encoder if kind == "encoder" else z
    form = context_exchange(c, z)  # the operations of a halo are those of gather, with fewer positions
    way, sizes = with_forms(c, "gather" if form == "halo" else form, expert_exchange(c, z)), letters(c, z)
    return [
        collective_cost(row, sizes, c, z) if row.axes else matmul_cost(row, sizes, c, z)
        for row in traced_layer.layer_rows(way, kind)
        if row.once_per_stack == shared
    ]


def sends_tokens_to_table(c: ModelAtWork, z: Sizes) -> bool:
    return tokens_go_to_table(c, z.b * z.s, c.vocab_size // z.mesh[TENSOR])


def embedding_rows(c: ModelAtWork, z: Sizes):
    """List the collectives of the embedding, which sums partial results over TENSOR."""
    yield Collective("reduce-scatter", (TENSOR,), z.b * z.s * c.d_model * z.width, part="activations", back=1)
    if sends_tokens_to_table(c, z):
        yield Collective("all-gather", SLICED, 4 * z.b * z.s * z.group(*SLICED), part="routes")
        yield Collective("all-to-all", SLICED, z.b * z.t * c.d_model * z.width, part="activations", back=1)


def logits_tokens(z: Sizes) -> int:
    """Return for how many tokens a device computes logits (over its vocabulary shard): 1/stages of the tokens."""
    return -(-z.b * z.t // z.mesh[STAGE]) * z.mesh[TENSOR]


def logits_rows(c: ModelAtWork, z: Sizes):
    """List the matmuls and collectives of logits and loss. Each stage computes them for 1/stages of the tokens."""
    n, tokens = z.mesh[TENSOR], logits_tokens(z)
    slices, words = vocabulary_slices(c.work.loss_chunk, tokens, c.vocab_size // n)
    arrays = tokens * c.d_model + c.d_model * words + tokens * words
    one = Matmul("logits", 2 * tokens * c.d_model * words, arrays * z.width)
    yield replace(one, flops=(slices - 1) * one.flops, hbm_bytes=(slices - 1) * one.hbm_bytes)
    yield replace(one, again=False)  # the backward pass reuses the logits of the last vocabulary chunk
    X = tokens * c.d_model * z.width
    yield Collective("reduce-scatter", (STAGE,), X // n * z.mesh[STAGE], part="activations", back=1)
    yield Collective("all-gather", (TENSOR,), X, part="activations", back=1)
    yield Collective("all-reduce", (TENSOR,), 3 * 4 * tokens, part="logits")  # largest, sum, target's


# How often ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """Passes of a layer in a step, summed over all microbatches."""

    forward: int  # forward passes
    again: int  # recomputations in backward passes
    inputs: int  # gradients of inputs
    weights: int  # gradients of weights


def passes(cfg: Config, sched: schedules.Schedule) -> Passes:
    """Count the passes through the layers of a stage.

    The balance loss costs an additional forward pass, unless all forward passes precede the first
    backward pass. If weight gradients are delayed, both halves of a backward pass recompute the forward pass, and both
    compute the gradients of inputs.
    """
    M, halves = sched.microbatches, 1 + sched.splits_backward
    once_more = has_balance_pass(cfg, sched) or repeats_passes(cfg, sched)
    return Passes(M * (2 if once_more else 1), M * halves, M * halves, M)


def has_balance_pass(cfg: Config, sched: schedules.Schedule) -> bool:
    """Return True if the balance loss costs an additional forward pass; see `passes`."""
    c = cfg.at_work
    return bool(sched.microbatches * sched.stages > 1 and not sched.turns and c.n_experts and c.balance_loss)


def repeats_passes(cfg: Config, sched: schedules.Schedule) -> bool:
    """Return True if a backward pass begins with another forward pass; see `encoder_decoder.stage`."""
    return architecture(cfg.model).passes > 1 and not sched.in_one_piece


@functools.cache
def layer_groups(c: ModelAtWork, stages: int) -> list[tuple[int, str, ModelAtWork]]:
    """List (number of layers, their kind, settings in which they all have a window, or none) of the busiest stage."""
    counts, window = busiest_stage(c, stages, parse_pipeline(c.work.schedule)[1]), parse_window(c.window).size
    return [(many, kind, replace(c, window="" if full else str(window))) for (kind, full), many in counts.items()]


def layer_counts(c: ModelAtWork, z: Sizes) -> dict[str, int]:
    """Count the layers of each kind on the busiest stage."""
    return Counter(kind for many, kind, _ in layer_groups(c, z.mesh[STAGE]) for _ in range(many))


def layers(c: ModelAtWork, z: Sizes) -> list[tuple[int, list]]:
    """List (number of layers, rows of one layer) for each kind of layer on the busiest stage, and the rows that all
    layers of an encoder or of a decoder share."""
    groups = layer_groups(c, z.mesh[STAGE])
    found = [(many, layer_costs(one, z, kind)) for many, kind, one in groups]
    return found + [(1, layer_costs(one, z, kind, shared=True)) for _, kind, one in groups]


@dataclass(frozen=True)
class Work:
    """The cost of one matmul in a step, including recomputation."""

    part: str
    flops: float
    hbm_bytes: float
    kernel: str = ""  # as in `Matmul`
    name: str = ""  # as in `Matmul`
    in_slot: bool = True  # for a microbatch, so that the step waits for it in a pipeline's bubble too


def work(cfg: Config, sched: schedules.Schedule, platform: str = "cpu") -> list[Work]:
    """List every matmul of one device in a step."""
    c, z = cfg.at_work, Sizes.from_config(cfg, platform)
    once, run = Passes(*(sched.microbatches,) * 4), passes(cfg, sched)

    def count(row: Matmul, many: float, run: Passes) -> Work:
        ahead = run.forward + run.again * row.again
        both = zip((row.flops, row.hbm_bytes), row.back or (None, None), strict=True)
        back = lambda x, given: x * (run.inputs + run.weights) if given is None else given * run.inputs
        return Work(row.part, *(many * (ahead * x + back(x, given)) for x, given in both), row.kernel, row.name)

    rows = [(row, many, run) for many, found in layers(c, z) for row in found]
    rows += [(row, 1, once) for row in logits_rows(c, z)]
    once_per_step = [Work(matrices.MUON, one.flops, one.hbm_bytes, name=matrices.NEWTON_SCHULZ, in_slot=False)
                     for one in matrices.matrices(cfg)]  # fmt: skip
    return [count(*one) for one in rows if isinstance(one[0], Matmul)] + once_per_step


def traffic(
    cfg: Config, sched: schedules.Schedule, platform: str = "cpu", chip: str = "", slices: int = 1
) -> list[Traffic]:
    """List everything that one device sends in a step, except for a few numbers (counts, norms, metrics)."""
    c, z, run = cfg.at_work, Sizes.from_config(cfg, platform), passes(cfg, sched)
    once, sums = Passes(*(sched.microbatches,) * 4), networks.Sums(cfg, platform, chip, slices)

    def activations(rows, many: int, run: Passes):
        for row in rows:
            if isinstance(row, Collective):
                for one in row.in_step(many, run.forward, run.again, run.inputs):
                    sums.add(one)

    def add(part: str, kind: str, axes: tuple[str, ...], size: float, count: float):
        sums.add(Collective(kind, axes, size, count, part))

    for many, rows in layers(c, z):
        activations(rows, many, run)
    for one in z.streams:
        activations(embedding_rows(c, one), 1, Passes(lookups(cfg, sched), 0, sched.microbatches, 0))
    activations(logits_rows(c, z), 1, once)
    sent = sum(one.b * one.t for one in z.streams) * c.d_model * z.width
    add("activations", "collective-permute", (STAGE,), sent, messages(cfg, sched))
    if c.n_experts:
        add("statistics", "all-reduce", sharding.TOKENS, 4 * (2 * c.n_experts + 3) * z.blocks, 1)
    add("batch", "all-gather", (CONTEXT,), 6 * 4 * z.b * sched.microbatches * z.T, 1)
    for w in weights(cfg):
        for row in weight_collectives(w, cfg, sched, z, run):
            sums.add(row)
        if cfg.optim.outer:
            add(networks.OUTER, "all-reduce", (DATA,), 4 * w.local_size, 1 / parse_outer(cfg.optim.outer).every)
    for row in (row for one in matrices.matrices(cfg) for row in one.collectives()):
        sums.add(row)
    return [Traffic(*key, *value, is_in_slot(c, key[0], key[2])) for key, value in sums.found.items()]


def messages(cfg: Config, sched: schedules.Schedule) -> int:
    """Count the sends of a stage to a neighboring stage: one after each tick, forward and backward."""
    if sched.stages == 1:
        return 0
    ahead = schedules.forward_only(sched).ticks if has_balance_pass(cfg, sched) else 0
    return sched.ticks * (1 if sched.turns else 2) + ahead


def lookups(cfg: Config, sched: schedules.Schedule) -> int:
    """Count the microbatches whose tokens are embedded in a step."""
    return sched.microbatches * (2 if has_balance_pass(cfg, sched) else 1)


def is_in_slot(c: ModelAtWork, part: str, axes: tuple[str, ...]) -> bool:
    once = part in ("weights", "gradients") and c.work.gather == "step"
    rare = once or part in ("batch", "replicas", matrices.MUON)
    return not rare and not any(axis.startswith(STAGE) for axis in axes)


def weight_uses(w: Weights, cfg: Config, sched: schedules.Schedule, z: Sizes, run: Passes):
    """Yield the all-gathers of one parameter before matmuls use it, and the reductions of its gradients: in each layer
    or slice of the vocabulary, or once per step."""
    c, M = cfg.at_work, sched.microbatches
    once, layer_size = c.work.gather == "step", w.gathered_size / w.layers

    def use(ahead: int, again: int, back: int, size: float, chunks: float = 1, of: str = "", dims: str = w.d.dims):
        """Yield the collectives of chunks of `size` entries. of: what they are for, an argument of `hiding.exposed`"""
        for count, when in ((ahead, "forward"), (again, "again")):
            yield Collective("all-gather", w.gathered_over, size * w.width, chunks * count, "weights", when, of)
        if w.d.trainable:
            # Only gradients inside a layer may become all-reduces. Those of several microbatches are summed in float32.
            kind = "reduce-scatter" if once else hiding.gradient_collective(dims, w.shard_width, z.platform)
            summed = size * (4 if once and M * sched.stages > 1 else w.width)
            yield Collective(kind, w.gathered_over, summed, chunks * back, "gradients", "back", of)

    if once:
        yield from use(1, 0, 1, layer_size, w.layers)
        return
    if w.name.startswith(LAYERS):
        of = "experts" if "E" in w.d.dims else "weights"
        yield from use(run.forward, run.again, run.weights, layer_size, w.layers, of)
    for one in z.streams:
        if w.name == "embedding_VD" and not sends_tokens_to_table(c, one):
            yield from use(lookups(cfg, sched), 0, M, w.gathered_size)
    if w.name == ("embedding_VD" if c.tie_embeddings else "unembedding_DV"):
        v = c.vocab_size // z.mesh[TENSOR]
        slices, words = vocabulary_slices(c.work.loss_chunk, logits_tokens(z), v)
        # The all-gather of the first chunk and the reduction of the last gradient overlap with nothing.
        for chunks, of in ((slices - 1, "vocabulary"), (1, "")):
            yield from use(M, 0, M, w.gathered_size / v * words, chunks, of, "DV")


def weight_collectives(w: Weights, cfg: Config, sched: schedules.Schedule, z: Sizes, run: Passes):
    """Yield the collectives of one parameter: all-gathers of weights and reductions of gradients."""
    yield from weight_uses(w, cfg, sched, z, run)
    if w.d.trainable:
        stored = as_stored(w.d, cfg) is not w.d  # sharded over its replicas
        for kind in ("reduce-scatter", "all-gather") if stored else ("all-reduce",):
            yield Collective(kind, w.replicas, w.local_size * w.d.dtype.itemsize, 1, "replicas")
    if sched.chunks > 1 and "blocks" in w.name:  # interleaved: send layers to the stages that compute them, and back
        held = (w.gathered_size if cfg.at_work.work.gather == "step" else w.local_size) / sched.chunks
        yield Collective("collective-permute", (STAGE,), held * w.width, sched.rounds, "weights")
        yield Collective("collective-permute", (STAGE,), held * 4, sched.rounds, "gradients")


# Waiting --------------------------------------------------------------------------------------------------------------


def slots(cfg: Config, sched: schedules.Schedule) -> tuple[float, float, float]:
    """Return the cost of a forward, a backward and a weight-gradient slot, in forward passes of a stage."""
    c = cfg.at_work
    # Fraction of a forward pass that is recomputed; with "dots", attention scores and experts
    again = {"none": 0.0, "dots": 0.2, "branches": 1.0, "full": 1.0}.get(c.work.remat)
    again = recomputed_share(c, Sizes.from_config(cfg)) if again is None else again
    again += repeats_passes(cfg, sched)
    return (1.0, again + 1, again + 2) if sched.splits_backward else (1.0, again + 2, 0.0)


def recomputed_share(c: ModelAtWork, z: Sizes) -> float:
    """Return the fraction of the layers' forward FLOPs that backward passes repeat."""
    matmuls = [row for many, rows in layers(c, z) for row in rows * many if isinstance(row, Matmul)]
    return sum(row.flops * row.again for row in matmuls) / sum(row.flops for row in matmuls)


def bubble(cfg: Config, sched: schedules.Schedule) -> float:
    """Return the fraction of the layers' time in which a stage waits. After every tick all wait for the slowest."""
    F, B, W = slots(cfg, sched)
    busy, whole = sched.microbatches * (F + B + W), schedules.lock_step(sched, F, B, W)
    if has_balance_pass(cfg, sched):
        busy, whole = busy + sched.microbatches * F, whole + schedules.lock_step(schedules.forward_only(sched), F)
    return max(1 - busy / whole, 0.0)  # rounding
