"""Predict the peak memory of a device in a training step. Letters are sizes on one device, as in `costs.py`."""

import math
from dataclasses import replace

import model
import optimizer
from config import Config, ModelAtWork
from config.fields import parse_remat
from encoder_decoder import BUCKETS
from kernels import grouped
from parameters import as_stored
from pipeline import schedules
from plan.chips import hiding
from plan.count.costs import (
    LAYERS,
    Sizes,
    Weights,
    context_exchange,
    grouped_rows,
    layer_counts,
    logits_tokens,
    vocabulary_slices,
    weights,
)
from sharding import CONTEXT, EXPERT, TENSOR

MEANS = {  # what each part of `memory` holds; docs/planner.md and the planner's page show it
    "parameters": "this device's shards of the weights",
    "optimizer": "two moments of each of its parameters",
    "outer": "with local steps: the outer parameters and their momentum",
    "batch": "tokens and targets",
    "gradients": "of the shards, or of unsharded weights if they are gathered once per step",
    "weights": "weights that are gathered for use",
    "saved": "activations that are saved for the backward pass",
    "pipeline": "activations between stages",
    "at work": "temporary arrays of one layer, or of the logits, while it is computed",
}


def expert_inputs(c: ModelAtWork, z: Sizes) -> int:
    """Return how many tokens the experts of one device receive in an MoE layer, counted once for each expert."""
    if c.capacity_factor:
        return c.n_experts * z.b * model.slots_per_expert(c, z.T)
    return z.b * z.s * z.mesh[EXPERT] * c.top_k


def listed_bytes(c: ModelAtWork, z: Sizes, kind: str, on_host: bool) -> float:
    """Return the bytes of the activations of one layer that a list in `work.remat` saves, for one microbatch.

    on_host  those that the host's memory stores, or those that the device stores. A CPU stores all of them as a device
    """
    listed, N, h, f32 = parse_remat(c.work.remat) or {}, z.b * z.s, c.n_heads // z.mesh[TENSOR], 4
    stream, is_moe = z.b * z.t * c.d_model, kind == "moe"
    # A ring saves the results of each step. After the first, a step has two forms: for half of the queries, and for all
    steps = 1 + 1.5 * (z.mesh[CONTEXT] - 1) if context_exchange(c, z) == "ring" else 1
    results = 0 if c.prefix_lm else N * h * steps  # attention with a mask is always recomputed
    if c.attention == "mla":
        score, value, keys = c.d_head + c.d_rope, c.d_value, c.d_kv_latent + c.d_rope
    else:
        score, value, keys = c.d_head, c.d_head, 2 * c.n_kv_heads // z.mesh[TENSOR] * c.d_head
    dense, m = N * (c.n_shared * c.d_expert if is_moe else c.d_ff) // z.mesh[TENSOR], c.d_expert // z.mesh[TENSOR]
    sizes = {
        "input": stream, "queries": N * h * score, "keys": N * keys, "attention": results * value,
        "branch": 0 if c.parallel_residual else stream,
        "hidden": (1 + model.gated(c)) * (dense + (expert_inputs(c, z) * m if is_moe else 0)),
    }  # fmt: skip
    at = {"input": False} | listed  # the device saves the input, unless the host does
    names = [name for name, host in at.items() if (host and z.platform != "cpu") == on_host]
    return sum(sizes[name] * z.width + (name == "attention") * results * f32 for name in names)


def saved_bytes(c: ModelAtWork, z: Sizes, kind: str, remat: str, one_piece: bool = False) -> float:
    """Return the bytes of activations that one layer saves for the backward pass of one microbatch.

    remat      "full" saves the layer's input. "branches" also saves the input of the second branch. "dots" saves the
               layer's input and the outputs of matmuls without batch dims. "none" saves every operand that a gradient
               needs: inputs of norms, queries, keys, values, attention outputs, and intermediate values of an
               activation function. For a list, see `listed_bytes`
    one_piece  True if the step has only this microbatch
    """
    is_moe, z = kind == "moe", z.of_encoder if kind == "encoder" else z
    N, f32, n_context = z.b * z.s, 4, z.mesh[CONTEXT]
    way = context_exchange(c, z)
    keys = z.b * z.T if way == "gather" else N
    stream, whole = z.b * z.t * c.d_model, N * c.d_model
    h = c.n_heads // z.mesh[TENSOR]
    if c.attention == "mla":
        latent, score, value = c.d_kv_latent + c.d_rope + c.d_query_latent, c.d_head + c.d_rope, c.d_value
        g, made = h, keys * h * (c.d_head + value)  # keys and values computed from the latent
    else:
        latent, score, value = 0, c.d_head, c.d_head
        g = c.n_kv_heads // z.mesh[TENSOR]
        made = N * 2 * g * c.d_head
    crosses = kind == "decoder"  # attends to the S positions of the encoder, too
    crossed = crosses * (N * h + z.b * z.S * g) * (score + value)  # queries, outputs, keys and values
    n, m = z.mesh[EXPERT], c.d_expert // z.mesh[TENSOR]
    rows, tiles = expert_inputs(c, z) if is_moe else 0, 0
    if is_moe and not c.capacity_factor:
        tiles = 0 if z.platform == "tpu" else grouped.padded_tiles(rows, c.n_experts // n)[1]
        rows = grouped_rows(rows, c.n_experts // n, z.platform)
    dense = N * (c.n_shared * c.d_expert if is_moe else c.d_ff) // z.mesh[TENSOR]
    branches = 1 if c.parallel_residual else 2 + crosses  # each normalizes and gathers the residual stream
    if remat in ("full", "branches"):
        return (branches if remat == "branches" else 1) * stream * z.width
    if remat == "dots":
        # Without a latent (GQA), a TPU saves neither the normalized input of attention nor its output, except in a
        # narrow model in one piece. MLA in one piece saves a copy of the rotary key for each head.
        on_tpu, less = z.platform == "tpu", 0
        if on_tpu and c.attention == "gqa" and not (one_piece and not hiding.is_wide(c)):
            less = stream + whole
        if on_tpu and c.attention == "mla" and one_piece:
            made += keys * h * c.d_rope
        outputs = whole * ((2 if dense else 1) + crosses)
        return (branches * stream + outputs - less + N * latent + N * h * score + made
                + crossed + dense * (1 + model.gated(c))) * z.width  # fmt: skip
    matrices, activation = 2 + model.gated(c), 6 - model.gated(c)
    attended = ((N * h + keys * g) * (score + value) + crossed) * z.width + N * h * f32
    if way == "all_to_all":  # attention outputs before and after the all-to-all
        attended += N * h * value * z.width
    if way == "ring":  # each step of the ring saves the partial output of the previous steps
        attended += (n_context - 1) * N * h * (value + 1) * f32
    if remat == "fused":  # a TPU recomputes values that need no matmul instead of saving them
        return attended + (branches * stream + (2 * branches - 1) * whole + N * latent + matrices * (dense + rows * m)
                           + 3 * rows * c.d_model) * z.width  # fmt: skip
    return (
        branches * 2 * stream * f32 + (branches * stream + (2 * branches - 1) * whole + 3 * N * latent) * z.width
        + attended + (dense + rows * m) * activation * z.width
        + (3 * rows * c.d_model + tiles * matrices * c.d_model * m) * z.width
    )  # fmt: skip


def moments_bytes(cfg: Config, w: list[Weights]) -> float:
    """Return the bytes of one device's optimizer moments. A frozen parameter has none."""
    frozen = optimizer.frozen_names(cfg.optim, [x.name for x in w])

    def entries(x: Weights) -> float:
        if cfg.optim.name == "adamw":
            return 2 * x.local_size
        split = [math.prod(x.mesh[axis] for axis in axes) for axes in x.axes]
        shapes = optimizer.second_moment_shapes(x.d)
        return sum(math.prod(n // by if n > 1 else 1 for n, by in zip(shape, split, strict=True)) for shape in shapes)

    return sum(entries(x) * x.d.dtype.itemsize for x in w if x.name not in frozen)


def score_bytes(c: ModelAtWork, z: Sizes, kind: str) -> float:
    """Return the bytes of the scores that attention with a mask stores in float32; attention in blocks stores none."""
    z = z.of_encoder if kind == "encoder" else z
    keys = {"encoder": z.s, "decoder": z.s + z.S}.get(kind, z.T * c.prefix_lm)
    return 4 * z.b * c.n_heads // z.mesh[TENSOR] * z.s * keys


def bias_bytes(c: ModelAtWork, z: Sizes) -> float:
    """Return the bytes of the position biases of both stacks, of their gradients and of the one-hot rows (see
    `encoder_decoder.position_bias`)."""
    return 4 * (z.S**2 + z.T**2) * (BUCKETS + 2 * c.n_heads // z.mesh[TENSOR]) if z.S else 0


# Arrays as large as the scores: in the layer that is being computed, and among what a layer saves with remat=none
SCORES_AT_WORK, SCORES_SAVED = 3, 9


def memory(cfg: Config, sched: schedules.Schedule, platform: str = "cpu") -> dict[str, float]:
    """Predict one device's peak memory in bytes, by part. The state is exact; temporary arrays are an estimate."""
    c, z = cfg.at_work, Sizes.from_config(cfg, platform)
    one_piece, w = sched.in_one_piece, weights(cfg)
    stored = [replace(x, d=as_stored(x.d, cfg)) for x in w]
    state = sum(x.local_size * x.d.dtype.itemsize for x in stored)
    # What optim.shard_over_data shards is gathered for a step. With gather=step, it is then gathered over fsdp too.
    gathered = sum(x.local_size * x.d.dtype.itemsize for x, held in zip(w, stored, strict=True) if x.d is not held.d)
    there = [(many, kind) for kind, many in layer_counts(c, z).items() if many]
    scores = SCORES_SAVED if c.work.remat == "none" else 0
    listed = parse_remat(c.work.remat)
    saved_by = lambda kind: (listed_bytes(c, z, kind, on_host=False) if listed
                             else saved_bytes(c, z, kind, c.work.remat, one_piece))  # fmt: skip
    each = [many * (saved_by(kind) + scores * score_bytes(c, z, kind)) for many, kind in there]
    saved = sum(each)
    on_tpu = platform == "tpu"
    at_work = "fused" if on_tpu else "none"
    work = max(saved_bytes(c, z, kind, at_work) + SCORES_AT_WORK * score_bytes(c, z, kind) for _, kind in there)
    of_layer = max(sum(x.gathered_size * x.width // x.layers for x in w if x.name.startswith(part))
                   for part in ("prefix.", "blocks.dense.", "blocks.moe.", *LAYERS[2:]))  # fmt: skip
    buffers, stream = sched.slots, sum(one.b * one.t for one in z.streams) * c.d_model * z.width
    if repeats_passes(cfg, sched):  # a pass saves its input; its backward pass saves what its layers save
        saved = max(each) + buffers.kept * stream
    else:
        saved = (buffers.kept + (not one_piece)) * saved / sched.chunks
    step = c.work.gather == "step"
    table = max(x.gathered_size * x.width for x in w if x.name in ("embedding_VD", "unembedding_DV"))
    # With gather=step, gradients are summed over microbatches in float32. A CPU has a second copy while it sends them.
    summed = 4 if on_tpu else 8
    whole = lambda x: x.gathered_size * (x.width if one_piece else summed)
    gradients = sum(whole(x) if step else x.local_size * 4 for x in w)
    tokens = logits_tokens(z)
    logits = tokens * vocabulary_slices(c.work.loss_chunk, tokens, c.vocab_size // z.mesh[TENSOR])[1] * 4
    freed = gradients if one_piece and on_tpu else 0
    # The outer parameters of local steps, and their momentum in float32
    outer = sum(x.local_size * (x.d.dtype.itemsize + 4) for x in w) if cfg.optim.outer_every else 0
    return {
        "parameters": state,
        "optimizer": moments_bytes(cfg, stored),
        **({"outer": outer} if cfg.optim.outer_every else {}),
        "batch": 4 * z.b * sched.microbatches * (5 * z.s + 3 * z.S + z.s * c.prefix_lm),
        "gradients": gradients,
        "weights": sum(x.gathered_size * x.width for x in w) if step else 2 * of_layer + gathered,
        "saved": saved,
        "pipeline": (buffers.inbox + buffers.cotangents) * stream,
        # The temporary arrays of one layer, or of the logits. In one piece, no layer has a gradient yet when the logits
        # are computed (`freed`).
        "at work": max(work, (1 if on_tpu else 3) * logits + table - freed) + bias_bytes(c, z),
    }
