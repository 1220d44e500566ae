"""Every implementation in `kernels/attention.py` equals attention with a score matrix, without storing one. No program
visits future blocks or grows with the sequence. TPU and GPU kernels run in Pallas's interpreter."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from config import MeshConfig
from kernels import attention, attention_gpu, blocks as blocking
from kernels.blocks import Reach
from overlap import context
from sharding import CONTEXT, FSDP, axis_index, make_mesh
from tests import scores
from tests.helpers import every_form

B, H, K, U, R = 2, 4, 24, 16, 10
HIDDEN = np.float32(blocking.HIDDEN)


def by_scores(reach, q, k, v_bSgU, segments_bs, segments_bS, here, d_mixed_bshU, d_log_sum_bsh):
    """Attention, logsumexps and gradients, from a score matrix in float32."""
    order_s, S = jnp.asarray(blocking.query_positions(reach.starts, segments_bs.shape[1]))[here], segments_bS.shape[1]
    before_sS = order_s[:, None] - jnp.arange(S)[None]
    in_reach_sS = (before_sS >= 0) & (before_sS < (reach.window or 2**30))
    seen_bsS = in_reach_sS[None] & (segments_bs[:, :, None] == segments_bS[:, None, :])

    def whole(*operands):
        q_bshK, k_bSgK, v_bSgU = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
        if isinstance(q_bshK, tuple):  # queries have been scaled, and all heads share the rotary key
            q_bshK, (content_bShK, rotary_bSR) = jnp.concatenate(q_bshK, -1) * (K + R) ** 0.5, k_bSgK
            k_bSgK = jnp.concatenate([content_bShK, jnp.stack([rotary_bSR] * H, axis=2)], -1)
        k_bShK = jnp.repeat(k_bSgK, H // k_bSgK.shape[2], axis=2)
        scores_bshS = jnp.einsum("bshK,bShK->bshS", q_bshK * q_bshK.shape[-1] ** -0.5, k_bShK)
        scores_bshS = reach.cap * jnp.tanh(scores_bshS / reach.cap) if reach.cap else scores_bshS
        log_sum_bsh = jax.nn.logsumexp(jnp.where(seen_bsS[:, :, None], scores_bshS, blocking.HIDDEN), axis=-1)
        log_sum_bsh = jnp.where(jnp.any(seen_bsS, axis=-1)[..., None], log_sum_bsh, blocking.HIDDEN)
        return scores.attend(q_bshK, k_bSgK, v_bSgU, seen_bsS, reach.cap), log_sum_bsh

    results, pull = jax.vjp(whole, q, k, v_bSgU)
    return *results, *pull((d_mixed_bshU.astype(jnp.float32), d_log_sum_bsh))


def by_form(mixed, pulled):
    """The same, computed by `partial_attention` with one implementation."""

    def run(reach, *operands):
        *inputs, here, d_mixed_bshU, d_log_sum_bsh = operands

        def chosen(*args, **forms):
            return (mixed if len(args) == len(inputs) + 1 else pulled)(reach, *args)

        with mock.patch.object(jax.lax, "platform_dependent", chosen):
            attend = lambda q, k, v: attention.partial_attention(q, k, v, *inputs[3:], reach, here)
            results, pull = jax.vjp(attend, *inputs[:3])
            return *results, *pull((d_mixed_bshU, d_log_sum_bsh))

    return run


def interpreted(kernel):
    return lambda *args: kernel(*args, interpret=True)


def with_joined_parts(mixed, pulled):
    return by_form(attention.with_joined_parts(mixed), attention.grads_with_joined_parts(pulled))


FORMS = {
    "in blocks": with_joined_parts(attention.mixed_in_blocks, attention.pulled_in_blocks),
    "by visits": by_form(interpreted(attention.tpu_attention), interpreted(attention.tpu_attention_grads)),
    "by programs": with_joined_parts(interpreted(attention.gpu_attention), interpreted(attention.gpu_attention_grads)),
}


def in_documents(*lengths):
    return np.repeat(np.arange(len(lengths)), lengths)  # document 0 is padding


# number of queries, reach, device, documents of the queries, documents of the keys
ZIGZAG = ((0, 450), (150, 300))
MASKS = {
    "one document": (384, Reach(), 0, in_documents(0, 384), in_documents(0, 384)),
    "documents and padding, incomplete last block": (
        300, Reach(), 0, in_documents(0, 130, 7, 100, 63) % 4, in_documents(0, 130, 7, 100, 63) % 4),
    "early and late chunk": (300, Reach(ZIGZAG), 0, in_documents(0, 150, 0, 150), in_documents(0, 170, 230, 200)),
    "chunks in the middle": (300, Reach(ZIGZAG), 1, in_documents(0, 20, 280), in_documents(0, 170, 430)),
    "keys of another device, a document without keys there": (
        100, Reach(((310,),)), 0, in_documents(0, 60, 40), in_documents(0, 260, 0, 50)),
    "a window shorter than a block": (384, Reach(window=37), 0, in_documents(0, 300, 84), in_documents(0, 300, 84)),
    "a window of several blocks, early and late chunk": (
        300, Reach(ZIGZAG, 200), 0, in_documents(0, 150, 150), in_documents(0, 170, 430)),
    "keys before the queries, which only some windows reach": (
        130, Reach(((140,),), 140), 0, in_documents(0, 20, 110), in_documents(0, 160, 110)),
    "capped scores, keys of another device, a document without keys there": (
        100, Reach(((310,),), cap=1.5), 0, in_documents(0, 60, 40), in_documents(0, 260, 0, 50)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups, parts, dtype", [(2, 1, "float32"), (4, 1, "bfloat16"), (4, 2, "float32"),
                                                  (4, 2, "bfloat16")])  # fmt: skip
def test_each_implementation_equals_attention_with_a_score_matrix(form, mask, groups, parts, dtype, monkeypatch):
    """Catches a block that is skipped or visited twice; a mask that exposes the future, another document or padding; a
    cap without a gradient; a softmax that is not rescaled when its maximum grows; a gradient that ignores the logsumexp
    or another head of the group; a rotary key's gradient that misses a head; and a span of keys that overwrites its
    queries' gradients."""
    monkeypatch.setattr(attention, "BLOCK", 60)
    monkeypatch.setattr(attention, "VMEM_BYTES", 2 * 128 * 256 * 8)  # the gradients of two blocks of keys
    monkeypatch.setattr(attention, "MOST_VISITS", 24)  # all 4 heads, 2 heads, or 1 head share a sum of gradients
    s, reach, here, documents_s, documents_S = MASKS[mask]
    rng, S = np.random.default_rng(s), len(documents_S)
    sizes = (B, s, H, K), (B, S, groups, K), (B, S, groups, U), (B, s, H, U)
    normal = lambda *size: jnp.asarray(rng.normal(size=size), dtype)
    q, k, v, d_mixed = (normal(*size) for size in sizes)
    if parts == 2:
        q, k = (q * (K + R) ** -0.5, normal(B, s, H, R) * (K + R) ** -0.5), (k, normal(B, S, R))
    segments = (jnp.asarray(np.stack([x, 0 * x + 1]), jnp.int32) for x in (documents_s, documents_S))
    operands = q, k, v, *segments, here, d_mixed, jnp.asarray(rng.normal(size=(B, s, H)), jnp.float32)
    want, got = (jax.jit(functools.partial(way, reach))(*operands) for way in (by_scores, FORMS[form]))
    # Relative to the largest entry. float32: sums of up to 600 numbers in a different order. bfloat16: weights, and
    # gradients of scores, are rounded to 8 bits before summation.
    values, gradients = (1e-5, 1e-4) if dtype == "float32" else (1e-2, 2e-2)
    names = ("mixed", "log_sum", *(("dq", "dk") if parts == 1 else ("dq", "dq_R", "dk", "dk_R")), "dv")
    for name, one, other in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other, allowed = np.float32(one), np.float32(other), gradients if name[0] == "d" else values
        hidden = other == HIDDEN
        np.testing.assert_array_equal(one[hidden], HIDDEN, err_msg=name)
        scale = np.abs(other[~hidden]).max()
        np.testing.assert_allclose(one[~hidden], other[~hidden], rtol=0, atol=allowed * scale, err_msg=name)
    assert np.all(np.float32(got[0])[np.float32(got[1]) == HIDDEN] == 0)


def operands(s, S, groups=2, dtype="float32"):
    """Shapes of queries, keys, values and documents."""
    shape = lambda *dims, dtype=dtype: jax.ShapeDtypeStruct(dims, dtype)
    return (shape(B, s, H, K), shape(B, S, groups, K), shape(B, S, groups, U), shape(B, s, dtype="int32"),
            shape(B, S, dtype="int32"))  # fmt: skip


def gradients(q, k, v, *segments, reach=blocking.CAUSAL):
    total = lambda q, k, v: jnp.sum(attention.partial_attention(q, k, v, *segments, reach)[0].astype(jnp.float32))
    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)


def test_attention_to_two_chunks_of_keys_merges_into_attention_to_all():
    """Catches chunks with equal weights, a wrong merge if a query sees no key, and a logsumexp without a gradient."""
    rng, S = np.random.default_rng(0), 20
    q, k, v = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in operands(7, S)[:3])
    segments_bs = jnp.asarray(rng.integers(0, 3, (B, 7)))
    segments_bS = jnp.asarray(np.sort(rng.integers(0, 3, (B, S))))
    part = lambda q, k, v, keys: attention.partial_attention(
        q, k[:, keys], v[:, keys], segments_bs, segments_bS[:, keys], Reach(((S,),)))  # fmt: skip
    whole = lambda q, k, v: part(q, k, v, slice(0, S))
    parts = lambda q, k, v: context.merge_softmaxes(part(q, k, v, slice(0, 8)), part(q, k, v, slice(8, S)))
    (want, pull), (got, pull_parts) = jax.vjp(whole, q, k, v), jax.vjp(parts, q, k, v)
    assert np.any(np.asarray(part(q, k, v, slice(0, 8))[1]) == HIDDEN), "choose keys that some queries do not see"
    for one, other in zip((*got, *pull_parts(want)), (*want, *pull(want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)  # float32 sums of 20 numbers of size 1


def test_no_scores_are_saved_for_the_backward_pass():
    """Catches a score matrix, or keys repeated for each head, among the residuals."""
    shapes = operands(512, 512)
    _, pull = jax.vjp(lambda *x: attention.partial_attention(*x, *(jnp.zeros(one.shape, int) for one in shapes[3:])),
                      *(jnp.zeros(one.shape) for one in shapes[:3]))  # fmt: skip
    saved = sorted(x.size for x in jax.tree.leaves(pull) if x.size > 1)
    q, k, v, documents, _ = (np.prod(x.shape) for x in shapes)
    log_sums, mixed = B * 512 * H, B * 512 * H * U
    assert saved == sorted([q, k, v, documents, documents, log_sums, mixed])


@pytest.mark.parametrize("cap", [0.0, 50.0])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_the_program_does_not_grow_with_the_sequence(platform, cap):
    """Catches a program unrolled over blocks, which takes minutes to compile for long sequences; a kernel in the
    program of the wrong platform, or missing from its own; and a kernel that Triton cannot lower."""
    pull = functools.partial(gradients, reach=Reach(cap=cap))
    lengths = {"tpu": (1024, 4096)}.get(platform, (1024, 32_768))  # on a TPU, a long one has a loop over heads
    for short_and_long in (lengths, (32_768, 131_072)):
        texts = [jax.jit(pull).trace(*operands(T, T)).lower(lowering_platforms=(platform,)).as_text()
                 for T in short_and_long]  # fmt: skip
        short, long = (text.count(" = ") - text.count("stablehlo.constant") for text in texts)  # equal ones are merged
        assert short == long
        kernels = [texts[0].count(call) for call in ("@tpu_custom_call", "@__gpu$xla.gpu.triton")]
        assert kernels == {"cpu": [0, 0], "tpu": [2, 0], "cuda": [0, 3]}[platform]


@pytest.mark.parametrize("b, g, spans, calls", [(1, 8, 2, 1), (1, 8, 13, 4), (2, 8, 13, 8), (1, 3, 9, 3), (1, 1, 9, 1)])
def test_the_heads_of_a_long_sequence_take_several_calls(b, g, spans, calls):
    """Catches a call with an odd number of heads, which leaves a core of a chip idle, or more calls than needed."""
    assert attention.count_calls(b, g, spans) == calls


def test_a_call_stores_few_gradients_of_its_queries():
    """Catches a float32 gradient of all queries for each span of keys at once: 3.3 GiB in a layer of Llama 3 8B with
    65,536 tokens over context=4."""
    s, S, h, g, width = 512, 65_536, 16, 8, 128
    shape = lambda *dims, dtype="bfloat16": jax.ShapeDtypeStruct((1, *dims), dtype)
    shapes = (
        shape(s, h, width),
        shape(S, g, width),
        shape(S, g, width),
        shape(s, dtype="int32"),
        shape(S, dtype="int32"),
    )
    pull = functools.partial(gradients, reach=Reach(((S - s,),)))
    text = jax.jit(pull).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    stored = set(re.findall(rf"tensor<(\d+)x1x(\d+)x{s}x{width}xf32>", text))
    assert stored == {("13", "4")}, "13 spans, and 4 of 16 heads"


def test_blocks_without_a_common_document_are_skipped():
    """Catches a TPU kernel that multiplies blocks of other documents by softmax weights of 0: it takes as long as for
    one document, and NaN * 0 is NaN. The values of the first document, a block of 128, are NaN here."""
    s, rng = 384, np.random.default_rng(0)
    documents_1s = jnp.asarray(in_documents(0, 128, 100, 156))[None]
    q, k, v, d_mixed = (jnp.asarray(rng.normal(size=(1, s, 2, width)), jnp.float32) for width in (K, K, U, U))
    v = v.at[:, :128].set(jnp.nan)
    operands = q, k, v, documents_1s, documents_1s, 0, d_mixed, jnp.zeros((1, s, 2))
    results = jax.jit(functools.partial(FORMS["by visits"], Reach()))(*operands)
    for name, x in zip(("mixed", "log_sum", "dq", "dk", "dv"), results, strict=True):
        assert np.all(np.isfinite(x[:, 128:])), name
    assert not np.any(np.isfinite(results[0][:, :128]))


@pytest.mark.parametrize("n, window", [(1, 0), (2, 0), (4, 0), (1, 512), (2, 600), (4, 100)])
def test_fully_masked_blocks_are_not_visited(n, window):
    """Catches matmuls of fully masked blocks, and devices with unequal numbers of visits."""
    T, block = 4096, 256
    reach = Reach(context.chunk_starts(T // n, n), window)
    meets, blocks = blocking.visible_blocks(T // n, T, reach, block), T // block
    before = [blocking.query_positions(reach.starts, T // n)[i][:, None] - np.arange(T) for i in range(n)]
    seen = [(x >= 0) & (x < (window or T)) for x in before]
    assert np.array_equal(meets, [x.reshape(-1, block, blocks, block).any(axis=(1, 3)) for x in seen])
    assert max(map(np.count_nonzero, meets)) == attention.visits(T // n, T, reach, block).shape[-1]
    for span in (None, 1, 2, 3):  # the planner counts, and the kernels list
        listed = attention.visits(T // n, T, reach, block, span).shape[-1]
        assert attention.blocks.count_visits(T // n, T, reach, block, span) == listed
    for here, met in enumerate(meets):  # GPU programs visit the same blocks
        _, *tables = attention_gpu.program_tables(reach, T // n, T, here, block)
        for (first, end), visited in zip(map(np.asarray, tables), (met, met.T), strict=True):
            index = np.arange(visited.shape[1])
            assert np.array_equal(visited, (index >= first[:, None]) & (index < end[:, None]))
    forward, _ = attention.flops(attention.count_visits(T // n, T, reach, K, U, 4, "cpu"), H, K, U)
    if not window:
        assert [np.count_nonzero(one) for one in meets] == [np.count_nonzero(meets[0])] * n
        assert n * forward == H * (K + U) * T**2 * (blocks + 1) / blocks


def test_a_traced_condition_turns_the_window_off():
    """Catches scanned layers that all have the window, or all attend to everything, forward or backward."""
    rng, reach, s = np.random.default_rng(0), Reach(window=7), 40
    q, k, v = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in operands(s, s)[:3])
    segments_bs = jnp.zeros((B, s), jnp.int32)

    def run(reach, is_full, q, k, v):
        (mixed, _), pull = jax.vjp(
            lambda *qkv: attention.partial_attention(*qkv, segments_bs, segments_bs, reach, 0, is_full), q, k, v
        )
        return mixed, pull((mixed, jnp.zeros((B, s, H))))

    run = jax.jit(run, static_argnums=0)
    for is_full, same in ((True, Reach()), (False, reach)):
        got, want = run(reach, jnp.asarray(is_full), q, k, v), run(same, None, q, k, v)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), got, want)
    assert np.abs(run(reach, jnp.asarray(True), q, k, v)[0] - got[0]).max() > 0.1


@pytest.mark.parametrize("b, h, visits, heads", [(8, 12, 10, 12), (3, 12, 10, 6), (3, 7, 10, 7), (2, 128, 1056, 8),
                                                 (1, 6, 20_000, 1)])  # fmt: skip
def test_heads_share_a_sum_if_their_visits_fit_and_both_cores_have_work(b, h, visits, heads):
    """Catches a list of visits that does not fit a core's scalar memory, and a core without a group."""
    assert attention.heads_per_group(b, h, visits) == heads


@pytest.mark.parametrize("K, U, width, block", [(64, 64, 2, 64), (128, 128, 2, 64), (96, 64, 4, 32), (192, 128, 4, 16)])
def test_a_block_of_keys_and_values_fits_a_gpu_core(K, U, width, block):
    """Catches double-buffered blocks that, with the queries' block, exceed the 99 KiB of an SM."""
    assert attention_gpu.gpu_block(4096, 4096, K, U, width) == block
    widened = sum(blocking.power_of_two(size) for size in (K, U)) * width * block
    assert 3 * widened <= 99 * 2**10
    assert attention_gpu.gpu_block(24, 48, K, U, width) == min(block, 32)  # a short sequence is not padded to 64


def test_kernel_types_name_the_axes_along_which_results_vary(monkeypatch):
    """Catches a kernel that check_vma rejects, and a missing sum in the gradient of replicated keys. Checks only types,
    because the interpreter does not run under check_vma."""
    monkeypatch.setattr(attention, "by_platform", every_form)
    q, k, v, segments_bs, segments_bS = (jnp.zeros(x.shape, x.dtype) for x in operands(24, 48))

    def total(k, v, q):
        def local(k, v, q, segments_bs):
            inputs = q, k, v, segments_bs, segments_bS
            reach = Reach(context.chunk_starts(24, 2))
            mixed, log_sum = attention.partial_attention(*inputs, reach, axis_index(CONTEXT))
            return jax.lax.psum(jnp.sum(mixed) + jnp.sum(log_sum), (FSDP, CONTEXT))

        mesh, varied = make_mesh(MeshConfig(fsdp=2, context=2)), P(None, (FSDP, CONTEXT))
        specs = P(), P(), varied, varied
        whole = jnp.tile(q, (1, 4, 1, 1)), jnp.tile(segments_bs, (1, 4))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(k, v, *whole)

    d_k, d_v = jax.eval_shape(jax.grad(total, argnums=(0, 1)), k, v, q)
    assert (d_k.shape, d_v.shape) == (k.shape, v.shape)
