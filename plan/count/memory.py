"""Predict the peak memory of a device in a training step. Letters are sizes on one device, as in `costs.py`.

The residuals of `jax.vjp` of a traced layer equal `saved_bytes` for "full", "branches" and lists. For "dots" and "none"
they differ from what compiled steps save by up to 40%, and for experts on a CPU by a factor of 8. There the compiler
merges and recomputes residuals, which a trace cannot show, so all sizes are written here.
"""

import math
from dataclasses import replace

import model
import optimizer
from config import Config, ModelAtWork
from config.fields import parse_adamw, parse_remat
from encoder_decoder import BUCKETS
from kernels import grouped
from parameters import as_stored
from pipeline import schedules
from plan.chips import hiding
from plan.count import matrices
from plan.count.costs import (
    LAYERS,
    Sizes,
    Weights,
    attended_chunks,
    context_exchange,
    expert_exchange,
    expert_rows,
    grouped_rows,
    in_lanes,
    layer_groups,
    logits_tokens,
    masked_keys,
    received_tokens,
    repeats_passes,
    scores_in_kernel,
    vocabulary_slices,
    weights,
)
from sharding import CONTEXT, EXPERT, STAGE, TENSOR

MEANS = {  # what each part of `memory` holds; docs/planner.md and the planner's page show it
    "parameters": "this device's shards of the weights",
    "optimizer": "two moments of each of its parameters; of matrices that Muon updates, one",
    "outer": "with local steps: the outer parameters and their momentum",
    "batch": "tokens and targets",
    "gradients": "of the shards, or of unsharded weights if they are gathered once per step",
    "weights": "weights that are gathered for use",
    "saved": "activations that are saved for the backward pass; with several microbatches, also the prefix's weights",
    "pipeline": "activations between stages",
    "at work": "temporary arrays of one layer, or of the logits, while it is computed",
}


FLOAT32 = 4  # bytes


def activations(c: ModelAtWork, z: Sizes, kind: str) -> dict[str, int]:
    """Return the entries of one layer's activations on a device, by name, for one microbatch.

    stream: the residual stream, and gathered: with the positions of the TENSOR group. heads: one number per position
    and head. projected: keys and values from matmuls with weights; in latent attention, all heads share a rotary key in
    addition. crossed: all that cross-attention reads and returns.
    hidden: one hidden activation of the feed-forward layer, or of the shared experts
    """
    N, h, g, score, value = z.b * z.s, c.n_heads // z.mesh[TENSOR], c.n_kv_heads // z.mesh[TENSOR], c.d_head, c.d_head
    keys = round(N * attended_chunks(c, z)) if context_exchange(c, z) in ("gather", "halo") else N
    latents, projected, shared, crosses = 0, N * 2 * g * c.d_head, 0, kind == "decoder"
    if c.attention == "mla":
        g, score, value, shared = h, c.d_head + c.d_rope, c.d_value, keys * c.d_rope
        latents, projected = N * (c.d_kv_latent + c.d_rope + c.d_query_latent), keys * h * (c.d_head + value)
    return {
        "stream": z.b * z.t * c.d_model, "gathered": N * c.d_model, "latents": latents, "heads": N * h,
        "queries": N * h * score, "outputs": N * h * value, "keys and values": keys * g * (c.d_head + value) + shared,
        "projected": projected, "crossed": crosses * (N * h + z.b * z.S * g) * (score + value),
        "hidden": N * (c.n_shared * c.d_expert if kind == "moe" else c.d_ff) // z.mesh[TENSOR],
    }  # fmt: skip


def listed_bytes(c: ModelAtWork, z: Sizes, kind: str, on_host: bool) -> float:
    """Return the bytes of the activations of one layer that a list in `work.remat` saves, for one microbatch.

    on_host  those that the host's memory stores, or those that the device stores. A CPU stores all of them as a device
    """
    listed, size = {"input": False} | (parse_remat(c.work.remat) or {}), activations(c, z, kind)
    # A ring saves the results of each step. After the first, a step has two forms: for half of the queries, and for all
    steps = 1 + 1.5 * (z.mesh[CONTEXT] - 1) if context_exchange(c, z) == "ring" else 1
    steps = 0 if c.prefix_lm else steps  # attention with a mask is always recomputed
    keys = c.d_kv_latent + c.d_rope if c.attention == "mla" else 2 * c.n_kv_heads // z.mesh[TENSOR] * c.d_head
    routed = saved_rows(c, z) * c.d_expert // z.mesh[TENSOR] if kind == "moe" else 0
    sizes = {
        "input": size["stream"], "queries": size["queries"], "keys": z.b * z.s * keys,
        "attention": size["outputs"] * steps, "branch": 0 if c.parallel_residual else size["stream"],
        "hidden": (1 + model.gated(c)) * (size["hidden"] + routed),
    }  # fmt: skip
    names = [name for name, host in listed.items() if (host and z.platform != "cpu") == on_host]
    return sum(sizes[name] * z.width + (name == "attention") * size["heads"] * steps * FLOAT32 for name in names)


def saved_bytes(c: ModelAtWork, z: Sizes, kind: str, remat: str, temporary=False) -> float:
    """Return the bytes of activations that one layer saves for the backward pass of one microbatch.

    remat      "full" saves the layer's input. "branches" also saves the input of the second branch. "dots" saves the
               layer's input and the outputs of matmuls without batch dims. "none" saves every operand that a gradient
               needs, and "fused" those of them that a TPU saves. For a list, see `listed_bytes`
    temporary  also count what is temporary in a layer: the rows of routed experts
    """
    z = z.of_encoder if kind == "encoder" else z
    size, crosses, gated, way = activations(c, z, kind), kind == "decoder", model.gated(c), context_exchange(c, z)
    branches = 1 if c.parallel_residual else 2 + crosses  # each normalizes and gathers the residual stream
    if remat in ("full", "branches"):
        return (branches if remat == "branches" else 1) * size["stream"] * z.width
    if remat == "dots":
        outputs = size["gathered"] * ((2 if size["hidden"] else 1) + crosses)
        dots = sum(size[name] for name in ("latents", "queries", "projected", "crossed"))
        if z.platform == "tpu":  # neither the normalized input of attention nor its output, but padded values (GQA)
            dots -= size["gathered"] + size["stream"]
            padded = c.attention == "gqa" and not (has_mask(c, z) and scores_in_kernel(c, z, "attention"))
            dots += size["projected"] // 2 * (in_lanes(c.d_head) / c.d_head - 1) * padded
        return (branches * size["stream"] + outputs + dots + (1 + gated) * size["hidden"]) * z.width

    # Of attention: operands, outputs (before and after an all-to-all), and the partial outputs of the steps of a ring.
    entries = (
        size["queries"] + size["keys and values"] + size["crossed"] + size["outputs"] * (1 + (way == "all_to_all"))
    )
    steps = z.mesh[CONTEXT] - 1 if way == "ring" else 0
    exact = size["heads"] + steps * (size["outputs"] + size["heads"])
    rows, copied = routed_rows(c, z) if kind == "moe" and (temporary or saved_rows(c, z)) else (0, 0)
    hidden = size["hidden"] + rows * c.d_expert // z.mesh[TENSOR]
    norms = branches * (1 + (c.norm == "sandwich"))
    entries += norms * size["stream"] + (2 * branches - 1) * size["gathered"] + 3 * rows * c.d_model
    if remat == "fused":  # a TPU recomputes values that need no matmul instead of saving them
        entries += gated * rows * c.d_model  # the gradients of the rows from two matmuls
        return exact * FLOAT32 + (entries + size["latents"] + (2 + gated) * hidden) * z.width
    exact += 2 * branches * size["stream"]
    return exact * FLOAT32 + (entries + 3 * size["latents"] + (6 - gated) * hidden + (2 + gated) * copied) * z.width


def saved_rows(c: ModelAtWork, z: Sizes) -> int:
    """Return the rows of the experts' activations that a layer may save. Routed experts save only their inputs."""
    return expert_rows(c, z)[0] * (expert_exchange(c, z) == "gathered")


def routed_rows(c: ModelAtWork, z: Sizes) -> tuple[int, int]:
    """Return the rows that the experts' matmuls compute on a device, and the entries of one matrix of experts that are
    copied for tiles of rows."""
    rows, e = expert_rows(c, z)[0], c.n_experts // z.mesh[EXPERT]
    if c.capacity_factor:
        return rows, 0
    tiles = 0 if z.platform == "tpu" else grouped.padded_tiles(rows, e)[1]
    return grouped_rows(rows, e, z.platform), tiles * c.d_model * (c.d_expert // z.mesh[TENSOR])


def exchange_bytes(c: ModelAtWork, z: Sizes, kind: str) -> float:
    """Return the bytes of a round's buffers: the tokens and their sums, before and after they are sent, and the copies
    that `overlap.experts.collect` adds up: top_k for each token, but a TPU adds them up as it gathers them."""
    buffers = (4 + c.top_k * (z.platform != "tpu")) * received_tokens(c, z) * z.width + 2 * FLOAT32 * z.b * z.s
    return buffers * c.d_model if kind == "moe" and expert_exchange(c, z) == "routed" else 0


def moments_bytes(cfg: Config, w: list[Weights]) -> float:
    """Return the bytes of one device's optimizer moments. A frozen parameter has none."""
    frozen, by_muon = optimizer.frozen_names(cfg.optim, [x.name for x in w]), optimizer.muon_names(cfg)

    def size(x: Weights) -> float:
        if cfg.optim.name != "adafactor":
            moments, count = parse_adamw(cfg.optim.adamw).moments, 1 if x.name in by_muon else 2
            return count * x.local_size * {"float32": 4, "bfloat16": 2}.get(moments, x.d.dtype.itemsize)
        split = [math.prod(x.mesh[axis] for axis in axes) for axes in x.axes]
        shapes = optimizer.second_moment_shapes(x.d)
        local = (math.prod(n // by if n > 1 else 1 for n, by in zip(shape, split, strict=True)) for shape in shapes)
        return sum(local) * x.d.dtype.itemsize

    return sum(size(x) for x in w if x.name not in frozen)


def has_mask(c: ModelAtWork, z: Sizes) -> bool:
    """Return whether layers attend with a mask (`kernels/masked.py`): in an encoder-decoder and in a prefix LM."""
    return bool(z.S or c.prefix_lm)


def score_bytes(c: ModelAtWork, z: Sizes, kind: str) -> float:
    """Return the bytes of the scores that attention with a mask stores in float32; kernels store none."""
    z = z.of_encoder if kind == "encoder" else z
    branches = ["attention"] * has_mask(c, z) + ["cross_attention"] * (kind == "decoder")
    keys = sum(masked_keys(z, branch) for branch in branches if not scores_in_kernel(c, z, branch))
    return FLOAT32 * z.b * c.n_heads // z.mesh[TENSOR] * z.s * keys


def bias_bytes(c: ModelAtWork, z: Sizes) -> float:
    """Return the bytes of the position biases of both stacks, of their gradients and of the one-hot rows (see
    `encoder_decoder.position_bias`)."""
    return 4 * (z.S**2 + z.T**2) * (BUCKETS + 2 * c.n_heads // z.mesh[TENSOR]) if z.S else 0


# Arrays as large as the scores: in the layer that is being computed, and among what a layer saves with remat=none
SCORES_AT_WORK, SCORES_SAVED = 3, 4


def memory(cfg: Config, sched: schedules.Schedule, platform: str = "cpu", chip: str = "") -> dict[str, float]:
    """Predict one device's peak memory in bytes, by part. The state is exact; temporary arrays are an estimate."""
    c, z = cfg.at_work, Sizes.from_config(cfg, platform)
    one_piece, on_tpu, w = sched.in_one_piece, platform == "tpu", weights(cfg)
    stored = [replace(x, d=as_stored(x.d, cfg)) for x in w]
    # What optim.shard_over_data shards is gathered for a step. With gather=step, it is then gathered over fsdp too.
    gathered = sum(x.local_size * x.d.dtype.itemsize for x, held in zip(w, stored, strict=True) if x.d is not held.d)
    there = layer_groups(c, z.mesh[STAGE])
    scores = SCORES_SAVED if c.work.remat == "none" else 0
    saved_by = lambda kind, c: (listed_bytes(c, z, kind, on_host=False) if parse_remat(c.work.remat)
                                else saved_bytes(c, z, kind, c.work.remat))  # fmt: skip
    each = [many * (saved_by(kind, one) + scores * score_bytes(c, z, kind)) for many, kind, one in there]
    saved = sum(each)
    counted = c.work.remat == "dots" and not on_tpu  # on a CPU, the outputs of a layer's matmuls are among `saved`
    twice = lambda kind, c: saved_bytes(c, z, kind, "dots") * counted
    temporary = lambda kind, c: saved_bytes(c, z, kind, "fused" if on_tpu else "none", temporary=True)
    work = max(temporary(kind, one) + exchange_bytes(one, z, kind) - twice(kind, one)
               + SCORES_AT_WORK * score_bytes(c, z, kind) for _, kind, one in there)  # fmt: skip
    of_layer = max(sum(x.gathered_size * x.width // x.layers for x in w if x.name.startswith(part))
                   for part in ("prefix.", "blocks.dense.", "blocks.moe.", *LAYERS[2:]))  # fmt: skip
    buffers, stream = sched.slots, sum(one.b * one.t for one in z.streams) * c.d_model * z.width
    if repeats_passes(cfg, sched):  # a pass saves its input; its backward pass saves what its layers save
        saved = max(each) + buffers.kept * stream
    elif not one_piece:
        # With "dots" and no stages, a TPU has no slot. It only copies the inputs of branches to another layout.
        inputs = sum(many * saved_bytes(one, z, kind, "branches") for many, kind, one in there)
        copied = inputs if on_tpu and cfg.mesh.stage == 1 and c.work.remat == "dots" else saved
        saved = (buffers.kept * saved + copied) / sched.chunks
    step = c.work.gather == "step"
    # Each slot also stores the prefix's weights, because the `cond` around it in `model.stage` returns them.
    prefix = sum((x.gathered_size if step else x.local_size) * x.width for x in w if x.name.startswith("prefix."))
    saved += buffers.kept * prefix * (not one_piece)
    table = max(x.gathered_size * x.width for x in w if x.name in ("embedding_VD", "unembedding_DV"))
    # With gather=step, gradients are summed over microbatches in float32. A CPU copies the sums of chunks to send them.
    summed = 4 if on_tpu or sched.chunks == 1 else 8
    gradients = sum(x.gathered_size * (x.width if one_piece else summed) if step else x.local_size * 4 for x in w)
    tokens = logits_tokens(z)
    words = vocabulary_slices(c.work.loss_chunk, tokens, c.vocab_size // z.mesh[TENSOR])[1]
    # With gather=step, a layer's gradients are added to sums over microbatches. A TPU's matmuls do so in place.
    unsharded = sum(x.gathered_size * x.width for x in w) + of_layer * (not (one_piece or on_tpu))
    weights_used = unsharded if step else 2 * of_layer + gathered
    # The update begins when all activations are gone.
    updates = max((one.temporary_bytes() for one in matrices.matrices(cfg)), default=0) - saved - weights_used
    # In one piece, no layer has a gradient yet when the logits are computed.
    logits = (4 if on_tpu else 12) * tokens * words + table - gradients * (one_piece and on_tpu)
    # A v4 holds some of these arrays in CMEM: between none and all that fit. Half of that is wrong by at most 64 MiB.
    at_work = max(work, logits, updates) + bias_bytes(c, z)
    outer = sum(x.local_size * (x.d.dtype.itemsize + 4) for x in w) if cfg.optim.outer else 0
    return {
        "parameters": sum(x.local_size * x.d.dtype.itemsize for x in stored),
        "optimizer": moments_bytes(cfg, stored),
        **({"outer": outer} if cfg.optim.outer else {}),
        "batch": 4 * z.b * sched.microbatches * (5 * z.s + 3 * z.S + z.s * c.prefix_lm),
        "gradients": gradients,
        "weights": weights_used,
        "saved": saved,
        "pipeline": (buffers.inbox + buffers.cotangents) * stream,
        "at work": at_work - min(at_work, hiding.CMEM_BYTES.get(chip, 0)) / 2,
    }
