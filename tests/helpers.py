"""Helpers for tests of the model: batches, random weights, single blocks, and a reference implementation.

The reference is float64 NumPy, one token and one head at a time. It does not use `model.py`: it only reads the weights
by name.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import model
import sharding
from compile import ordered
from config import Config, MeshConfig, ModelConfig
from plan.answer import show
from sharding import AXES, TOKENS, Declaration

GROUPED = {"attention": "gqa"}  # settings of every test of grouped attention


def in_model(settings: dict) -> dict:
    """Prefix the names of ModelConfig settings with "model."."""
    return {f"model.{name}": value for name, value in settings.items()}


# Batches --------------------------------------------------------------------------------------------------------------


def documents(*lengths, padding=0):
    """Return positions and segments of a row with documents of these lengths, then padding (segment 0)."""
    positions = [i for length in (*lengths, padding) for i in range(length)]
    segments = [number for number, length in enumerate(lengths, start=1) for _ in range(length)] + [0] * padding
    return np.array(positions, np.int32), np.array(segments, np.int32)


def random_rows(rng, B: int, T: int):
    """Draw rows with two documents and padding. Returns positions and segments, [B, T]."""
    rows = []
    for _ in range(B):
        padding = int(rng.integers(0, T // 3))
        first = int(rng.integers(1, T - padding))
        rows.append(documents(first, T - padding - first, padding=padding))
    return (np.stack(x) for x in zip(*rows, strict=True))


def random_batch(cfg: Config, seed: int):
    """Draw random tokens and targets. Rows have different documents, padding and target weights; an encoder has
    different rows, and a prefix LM has documents that begin with 0 to 4 inputs."""
    rng = np.random.default_rng(seed)
    B, T, V = cfg.data.batch_size, cfg.data.seq_len, cfg.model.vocab_size
    positions_BT, segments_BT = random_rows(rng, B, T)
    weights_BT = rng.uniform(0.5, 2, (B, T)) * (rng.random((B, T)) < 0.8) * (segments_BT > 0)
    batch = {
        "tokens_BT": rng.integers(0, V, (B, T), dtype=np.int32),
        "targets_BT": rng.integers(0, V, (B, T), dtype=np.int32),
        "positions_BT": positions_BT,
        "segments_BT": segments_BT,
        "weights_BT": weights_BT.astype(np.float32),
    }
    if cfg.model.prefix_lm:
        batch["prefix_BT"] = (positions_BT < rng.integers(0, 5, (B, 1))).astype(np.int32)
    if S := cfg.data.input_len:
        batch["encoder_tokens_BS"] = rng.integers(0, V, (B, S), dtype=np.int32)
        batch["encoder_positions_BS"], batch["encoder_segments_BS"] = random_rows(rng, B, S)
    return batch


# Weights and blocks ---------------------------------------------------------------------------------------------------


def draw(declarations, seed: int = 0):
    """Draw weights with NumPy. Gains and biases vary too, so that a test notices if one is not applied."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda d: np.float32(d.mean + (d.std or 0.1) * rng.normal(size=d.shape)), declarations)


def unstack(declarations):
    """Return the declarations of a single layer, without the leading dims P, L, J of stacked layers."""

    def one(d: Declaration):
        n = len(d.dims) - len(d.dims.lstrip("PLJ"))
        return dataclasses.replace(d, dims=d.dims[n:], shape=d.shape[n:], spec=P(*d.spec[n:]))

    return jax.tree.map(one, declarations)


@functools.cache
def moe_declarations(c: ModelConfig):
    return unstack(model.declare(c).blocks.moe.feed_forward)


@functools.cache
def attention_declarations(c: ModelConfig):
    return unstack(model.declare(c).blocks.moe.attention)


def compiled(function, declarations, n_arrays: int, mesh="data=1"):
    """Compile fn(w, *arrays) as the model does: in one `shard_map`, manual over all axes, with `check_vma`.

    Arrays are sharded over TOKENS along their first dim, so that they vary along every axis, as in the model. Every
    output needs at least one dim; its first is sharded over all axes.
    """
    specs = (sharding.specs(declarations), *[P(TOKENS)] * n_arrays)
    mesh = sharding.make_mesh(mesh)
    return ordered.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(AXES)), mesh)


def run(function, declarations, w, *arrays, mesh="data=1"):
    return jax.tree.map(np.asarray, compiled(function, declarations, len(arrays), mesh)(w, *arrays))


def equations(jaxpr):
    """Yield every equation of a jaxpr, including equations in loops, branches and calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def assert_gradients_close(got, want, share, what):
    """Check that each gradient equals `want` up to a share of its largest entry; an error names the worst."""
    got, want = sharding.flatten_named(got), sharding.flatten_named(want)
    assert set(got) == set(want)
    worst = {name: np.abs(got[name] - want[name]).max() / max(np.abs(want[name]).max(), 1e-20) for name in want}
    name = max(worst, key=worst.get)
    assert worst[name] <= share, f"{what}: {name} is off by {worst[name]:.2e} of its largest entry, allowed {share:.0e}"


# Reference implementation ---------------------------------------------------------------------------------------------


def np_rms_norm(x, gain, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


def np_norm(x, gain, bias, eps):
    """Apply RMSNorm, or LayerNorm if there is a bias."""
    if bias is None:
        return np_rms_norm(x, gain, eps)
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * gain + bias


def np_rotate(x_R, position, frequencies_r):
    """Rotate coordinates i and i + R/2, as one complex number, by position * frequency i."""
    half = len(x_R) // 2
    turned = (x_R[:half] + 1j * x_R[half:]) * np.exp(1j * position * frequencies_r)
    return np.concatenate([turned.real, turned.imag])


def np_frequency(i, width, theta, scaling):
    """Return the frequency of pair i, theta^(-2i/width), as the published rules scale it."""
    plain = theta ** (-2 * i / width)
    if not scaling:
        return plain
    if scaling.startswith("linear"):
        return plain / float(scaling.split(":")[1])
    factor, low, high, original = map(float, scaling.split(":")[1:5])
    if scaling.startswith("yarn"):  # by the number of the pair
        first, last = (width * np.log(original / (2 * np.pi * turns)) / (2 * np.log(theta)) for turns in (high, low))
        if not scaling.startswith("yarn_exact"):
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        slowed = np.clip((i - first) / (last - first), 0, 1)
        return plain / factor * slowed + plain * (1 - slowed)
    wavelength = 2 * np.pi / plain
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return plain / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * plain / factor + smooth * plain


def np_rotate_all(x_THR, positions_T, theta, scaling=""):
    width = x_THR.shape[-1]
    frequencies_r = np.array([np_frequency(i, width, theta, scaling) for i in range(width // 2)])
    rotate = lambda x_HR, position: [np_rotate(x_R, position, frequencies_r) for x_R in x_HR]
    return np_yarn_growth(scaling) * np.stack([*map(rotate, x_THR, positions_T)])


def np_yarn_growth(scaling):
    """Return the factor of rotated queries and rotated keys."""
    if not scaling.startswith("yarn"):
        return 1.0
    factor, *_, mscale, mscale_all = map(float, (scaling + ":0:0").split(":")[1:7])
    growth = lambda share: 1 + 0.1 * share * np.log(factor)
    return growth(mscale) / growth(mscale_all) if mscale and mscale_all else growth(1)


def np_softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def np_soft_cap(x, c: ModelConfig, which: int):
    """Cap attention's scores (0) or the logits (1), if the model does."""
    cap = float(c.softmax.split(":")[1 + which]) if c.softmax.startswith("cap:") else 0
    return np.tanh(x / cap) * cap if cap else x


def np_attend(c: ModelConfig, q_THK, k_THK, v_THU, positions_T, segments_T, window, sink_H=None):
    """Attend one query of one head at a time over the positions that it may see, the last `window` ones."""
    T, H, K = q_THK.shape
    out_THU = np.zeros((T, H, v_THU.shape[-1]))
    for s, h in itertools.product(range(T), range(H)):
        seen = [j for j in range(T) if 0 <= positions_T[s] - positions_T[j] < window and segments_T[j] == segments_T[s]]
        scores = np_soft_cap(k_THK[seen, h] @ q_THK[s, h] / np.sqrt(K), c, 0)
        with_sink = np.append(scores, -np.inf if sink_H is None else sink_H[h])
        out_THU[s, h] = np_softmax(with_sink)[:-1] @ v_THU[seen, h]
    return out_THU


def np_latent_attention(w, c: ModelConfig, x_TD, positions_T, segments_T, rotary, window):
    latent_TQ = x_TD
    if c.d_query_latent:
        latent_TQ = np_rms_norm(x_TD @ w.w_down_query_DQ, w.norm_query_Q, c.norm_eps)
    latent_TC = np_rms_norm(x_TD @ w.w_down_kv_DC, w.norm_kv_C, c.norm_eps)
    turn = lambda x: np_rotate_all(x, positions_T * rotary, c.rope_theta, c.rope_scaling)
    q_rotary_THR = turn(np.einsum("tq,qhr->thr", latent_TQ, w.w_query_rotary_QHR))
    k_rotary_THR = np.repeat(turn((x_TD @ w.w_key_rotary_DR)[:, None, :]), c.n_heads, axis=1)
    q = np.concatenate([np.einsum("tq,qhk->thk", latent_TQ, w.w_query_QHK), q_rotary_THR], axis=-1)
    k = np.concatenate([np.einsum("tc,chk->thk", latent_TC, w.w_key_CHK), k_rotary_THR], axis=-1)
    factor, *_, mscale_all = map(float, c.rope_scaling.split(":")[1:]) if c.rope_scaling else (1, 0)
    q *= (1 + 0.1 * mscale_all * np.log(factor)) ** 2  # DeepSeek-V3
    v = np.einsum("tc,chu->thu", latent_TC, w.w_value_CHU)
    out_THU = np_attend(c, q, k, v, positions_T, segments_T, window)
    return np.einsum("thu,hud->td", out_THU, w.w_out_HUD)


def np_grouped_attention(w, c: ModelConfig, x_TD, positions_T, segments_T, rotary, window):
    def turn(x_THK):
        turned, rest = np.split(x_THK, [c.rope_dims or c.d_head], axis=-1)
        return np.concatenate(
            [np_rotate_all(turned, positions_T * rotary, c.rope_theta, c.rope_scaling), rest], axis=-1
        )

    project = lambda w_DHK, bias_HK: np.einsum("td,dhk->thk", x_TD, w_DHK) + (0 if bias_HK is None else bias_HK)
    q_THK, k_TGK = project(w.w_query_DHK, w.bias_query_HK), project(w.w_key_DGK, w.bias_key_GK)
    if c.qk_norm:
        q_THK, k_TGK = np_rms_norm(q_THK, w.norm_query_K, c.norm_eps), np_rms_norm(k_TGK, w.norm_key_K, c.norm_eps)
    q_THK, k_TGK = turn(q_THK), turn(k_TGK)
    v_TGK = project(w.w_value_DGK, w.bias_value_GK)
    shared_by = [h * c.n_kv_heads // c.n_heads for h in range(c.n_heads)]  # consecutive heads share
    k_THK, v_THK = k_TGK[:, shared_by], v_TGK[:, shared_by]
    out_THK = np_attend(c, q_THK, k_THK, v_THK, positions_T, segments_T, window, w.sink_H)
    return np.einsum("thk,hkd->td", out_THK, w.w_out_HKD) + (0 if w.bias_out_D is None else w.bias_out_D)


def np_feed_forward(
    c: ModelConfig, x_D, w_gate_DF, w_up_DF, w_down_FD, bias_up_F=None, bias_down_D=None, bias_gate_F=None
):
    up_F = x_D @ w_up_DF + (0 if bias_up_F is None else bias_up_F)
    if w_gate_DF is None:  # GELU, in the tanh form
        hidden_F = 0.5 * up_F * (1 + np.tanh(np.sqrt(2 / np.pi) * (up_F + 0.044715 * up_F**3)))
    else:
        gate_F = x_D @ w_gate_DF + (0 if bias_gate_F is None else bias_gate_F)
        hidden_F = np_gate(c, gate_F, up_F)
    return hidden_F @ w_down_FD + (0 if bias_down_D is None else bias_down_D)


def np_gate(c: ModelConfig, gate_F, up_F):
    if c.activation == "swiglu_clamped":
        gate_F = np.where(gate_F > 7, 7, gate_F)
        up_F = np.where(np.abs(up_F) > 7, 7 * np.sign(up_F), up_F)
        return gate_F / (1 + np.exp(-1.702 * gate_F)) * (1 + up_F)
    return gate_F / (1 + np.exp(-gate_F)) * up_F


def np_dense(w, c: ModelConfig, x_D):
    return np_feed_forward(c, x_D, w.w_gate_DF, w.w_up_DF, w.w_down_FD, w.bias_up_F, w.bias_down_D)


def np_route(w, c: ModelConfig, x_D):
    """Return gates, experts and probabilities of one token."""
    logits_E = x_D @ w.w_router_DE + (0 if w.bias_router_E is None else w.bias_router_E)
    scores_E = 1 / (1 + np.exp(-logits_E)) if c.router == "sigmoid" else np_softmax(logits_E)
    bias_E = np.zeros(c.n_experts) if w.bias_E is None else w.bias_E
    experts = range(c.n_experts)
    n_groups, per_token = c.expert_groups
    if n_groups > 1:
        groups = np.array_split(experts, n_groups)
        groups = sorted(groups, key=lambda group: -np.sort((scores_E + bias_E)[group])[-2:].sum())
        experts = np.concatenate(groups[:per_token])
    experts = sorted(experts, key=lambda e: -(scores_E + bias_E)[e])[: c.top_k]
    total = scores_E[experts].sum() if c.normalize_gates and c.top_k > 1 else 1.0
    return c.routed_scaling * scores_E[experts] / total, experts, scores_E / scores_E.sum()


def np_moe(w, c: ModelConfig, x_TD, slots=None):
    """Run an MoE layer token by token. Return [T, D] and the number of dropped assignments of each token."""
    out_TD, taken_E, dropped_T = np.zeros(x_TD.shape), np.zeros(c.n_experts, int), np.zeros(len(x_TD), int)
    for t, x_D in enumerate(x_TD):
        gates, experts, _ = np_route(w, c, x_D)
        for gate, e in zip(gates, experts, strict=True):
            if slots is not None and taken_E[e] == slots:
                dropped_T[t] += 1
                continue
            taken_E[e] += 1
            weights = w.w_gate_EDM, w.w_up_EDM, w.w_down_EMD, w.bias_up_EM, w.bias_down_ED, w.bias_gate_EM
            out_TD[t] += gate * np_feed_forward(c, x_D, *(None if x is None else x[e] for x in weights))
        if w.shared is not None:
            out_TD[t] += np_dense(w.shared, c, x_D)
    return out_TD, dropped_T


def np_norm_after(update_TD, gain_D, c: ModelConfig):
    return update_TD if gain_D is None else np_rms_norm(update_TD, gain_D, c.norm_eps)


def np_layers(w, c: ModelConfig):
    """Yield (weights, is_moe) of the model's layers in order."""
    for p in range(c.dense_prefix):
        yield jax.tree.map(lambda x, p=p: x[p], w.prefix), False
    for n in range(c.n_blocks):
        if w.blocks.dense is not None:
            for j in range(w.blocks.dense.norm_attention_D.shape[1]):
                yield jax.tree.map(lambda x, n=n, j=j: x[n, j], w.blocks.dense), False
        if w.blocks.moe is not None:
            yield jax.tree.map(lambda x, n=n: x[n], w.blocks.moe), True


def np_model(w, c: ModelConfig, tokens_T, positions_T, segments_T, slots=None):
    """Return the logits of one sequence, [T, V], and each MoE layer's dropped assignments per token."""
    w = jax.tree.map(np.float64, w)
    x_TD, dropped = w.embedding_VD[tokens_T], []
    for number, (layer, is_moe) in enumerate(np_layers(w, c), start=1):
        rotary = not (c.no_rope_every and number % c.no_rope_every == 0)
        size, every, theta = map(float, ((c.window or f"{len(tokens_T)}") + ":0:0").split(":")[:3])
        full = every and number % every == 0
        here = dataclasses.replace(c, rope_theta=theta, rope_scaling="") if theta and not full else c
        attention = np_latent_attention if c.attention == "mla" else np_grouped_attention
        h_TD = np_norm(x_TD, layer.norm_attention_D, layer.norm_attention_bias_D, c.norm_eps)
        window = len(tokens_T) if full else size
        out_TD = attention(layer.attention, here, h_TD, positions_T, segments_T, rotary, window)
        x_TD = x_TD + np_norm_after(out_TD, layer.norm_after_attention_D, c)
        if not c.parallel_residual:
            h_TD = np_norm(x_TD, layer.norm_feed_forward_D, layer.norm_feed_forward_bias_D, c.norm_eps)
        if is_moe:
            out_TD, dropped_T = np_moe(layer.feed_forward, c, h_TD, slots)
            dropped.append(dropped_T)
        else:
            out_TD = np_dense(layer.feed_forward, c, h_TD)
        x_TD = x_TD + np_norm_after(out_TD, layer.norm_after_feed_forward_D, c)
    x_TD = np_norm(x_TD, w.norm_D, w.norm_bias_D, c.norm_eps)
    logits_TV = x_TD @ (w.embedding_VD.T if c.tie_embeddings else w.unembedding_DV)
    return np_soft_cap(logits_TV + (0 if w.bias_V is None else w.bias_V), c, 1), dropped


def np_cross_entropy(w, c: ModelConfig, batch, slots=None):
    """Return weighted sums over the batch by name, and the dropped assignments, [B, MoE layers, T]."""
    sums, dropped = collections.Counter(), []
    for row in range(len(batch["tokens_BT"])):
        tokens_T, positions_T, segments_T, targets_T, weights_T = (
            batch[f"{n}_BT"][row] for n in ("tokens", "positions", "segments", "targets", "weights")
        )
        logits_TV, dropped_LT = np_model(w, c, tokens_T, positions_T, segments_T, slots)
        log_TV = np.log(np_softmax(logits_TV))
        nats_T = -log_TV[np.arange(len(targets_T)), targets_T]
        terms = dict(nats=nats_T, weight=1.0, z_loss=np.log(np.sum(np.exp(logits_TV), axis=-1)) ** 2,
                     label_smoothing=-np.mean(log_TV, axis=-1) - nats_T)  # fmt: skip
        sums.update({name: np.sum(np.float64(weights_T) * x) for name, x in terms.items()})
        dropped.append(dropped_LT)
    return sums, np.array(dropped)


# Designs of cases -----------------------------------------------------------------------------------------------------


def tested_pairs(mesh: str, *features: str) -> set[frozenset]:
    """Return the pairs that a case tests: each mesh axis larger than 1 with each other such axis and each feature."""
    axes = [axis for axis, size in MeshConfig.parse(mesh).sizes.items() if size > 1]
    return {frozenset((axis, other)) for axis in axes for other in (*axes, *features) if other != axis}


def covering_cases(cases: dict[str, set]) -> list[str]:
    """Choose a few cases that cover all pairs, greedily: next the case with the most uncovered pairs."""
    chosen, wanted = [], set().union(*cases.values())
    while wanted:
        chosen.append(max(cases, key=lambda case: len(cases[case] & wanted)))
        wanted -= cases[chosen[-1]]
    return chosen


def with_repeats(cases, chosen=None, few=None) -> list:
    """Return test parameters for all cases; mark a case as a repeat if it is not chosen (default: `covering`).

    few  the chosen cases that `make test` runs; the others are marked `long`. None: all chosen cases
    """
    chosen = covering_cases(cases) if chosen is None else chosen
    long = set() if few is None else {*chosen} - {*few}
    marks = lambda case: pytest.mark.repeat if case not in chosen else pytest.mark.long if case in long else ()
    return [pytest.param(case, id=str(case), marks=marks(case)) for case in cases]


# The planner ----------------------------------------------------------------------------------------------------------


def check_prediction(plan, found: dict, state=0.01, flops=0.01, sent=0.01):
    """Check a plan: state and FLOPs within 1%, peak memory 20%, bytes 1% in total and over each set of axes with at
    least 1% of them, exposed bytes within 10% of all bytes."""
    rows = {what.strip(): (predicted, counted) for what, _, predicted, counted in show.compare(plan, found)}
    off = {what: predicted / counted - 1 for what, (predicted, counted) in rows.items() if counted}
    assert abs(off["parameters, optimizer, batch"]) <= state, off
    assert abs(off["peak memory"]) <= 0.20, off
    assert abs(off["FLOPs"]) <= flops, off
    assert abs(off["bytes sent"]) <= sent, off
    assert abs(plan.exposed_bytes - found["exposed_bytes"]) <= 0.10 * found["wire_bytes"], rows
    wires = {what: value for what, value in off.items() if what.startswith("over ")}
    assert wires or plan.cfg.mesh.devices == 1
    for what, value in wires.items():
        if rows[what][1] >= 0.01 * found["wire_bytes"]:
            assert abs(value) <= sent, off


def every_form(*args, tpu, gpu, default):
    """Replace `sharding.by_platform` with a version that traces the forms of all platforms."""
    return jax.lax.platform_dependent(*args, tpu=tpu, cuda=gpu, default=default)
