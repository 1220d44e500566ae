"""Layers whose weights are gathered one ahead are the same layers, and keep no more of them for the way back."""

import collections
import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

import overlap
import sharding
from model import REMAT
from overlap import scan_ahead
from sharding import AXES, FSDP
from xla import ledger, ordered

B, D, F, n = 3, 8, 20, 4  # rows of a device, widths, devices
SPLIT = P(AXES)


def layer(w, x_BD, number, shared):
    """A product, dropout, another product. Returns the stream, and a statistic."""
    ids_B, scale, key = shared
    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, (B, F))
    hidden_BF = checkpoint_name(jnp.tanh(x_BD @ w["up_DF"]) * kept * scale, "between branches")
    y_BD = x_BD + hidden_BF @ w["down_FD"] * (1 + number + ids_B)[:, None]
    return y_BD, {"sum": jnp.sum(hidden_BF)}


def gather(w):
    return {
        "up_DF": overlap.gather_weights(w["up_DF"], FSDP, 0),
        "down_FD": overlap.gather_weights(w["down_FD"], FSDP, 1),
    }


ENDS = {
    "looped": scan_ahead,
    "peeled": functools.partial(scan_ahead, peel=True),
    "held": functools.partial(scan_ahead, peel=True, hold=True),
}


def plainly(layer, gather, w_stack, x, context):
    stacked, shared = context
    return jax.lax.scan(lambda x, one: layer(gather(one[0]), x, one[1], shared), x, (w_stack, stacked))


def over_layers(scan, remat: str):
    """fn(w_stack, x, scale): the layers in order, on one device's slices."""
    one = REMAT[remat](layer)

    def run(w_stack, x_BD, scale):
        shared = jnp.array([4, 0, 2]), scale, jax.random.key(5)
        return scan(one, gather, sharding.vary(w_stack, AXES), x_BD, (3 + jnp.arange(len(w_stack["up_DF"])), shared))

    return run


def arrays(L: int):
    """Weights of L layers, the stream and its gradient, and those of the statistics: whole, to be split over FSDP."""
    rng = np.random.default_rng(L)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3
    w_stack = {"up_DF": draw(L, D, F), "down_FD": draw(L, F, D)}
    return w_stack, draw(n * B, D), draw(n * B, D), draw(L)


W_SPECS = {"up_DF": P(None, FSDP), "down_FD": P(None, None, FSDP)}


def on_mesh(function, out_specs):
    mesh = sharding.make_mesh(f"fsdp={n}")
    specs = W_SPECS, SPLIT, SPLIT, P()
    return ordered.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs), mesh)


def with_gradients(scan, remat: str):
    """fn(w_stack, x, dx, dy) -> x, y, and the gradients of w_stack, x and what the layers share."""

    def run(w_stack, x, dx, dy_L):
        (x, y), pull = jax.vjp(over_layers(scan, remat), w_stack, x, sharding.vary(jnp.float32(0.9), AXES))
        *grads, _ = pull((dx, {"sum": sharding.vary(dy_L, AXES)}))
        return x, y["sum"][:, None], *grads

    return on_mesh(run, (SPLIT, P(None, AXES), W_SPECS, SPLIT))


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("L", [1, 2, 5])
def test_layers_gathered_ahead_are_the_layers(L, remat, ends):
    """Catches weights of the layer before or after, a last layer that is gathered where there is none, gradients that
    land a layer further or are not scattered, and context, keys of dropout too, of another layer."""
    want = with_gradients(plainly, remat)(*arrays(L))
    got = with_gradients(ENDS[ends], remat)(*arrays(L))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)  # float32, other order of sums
    jax.tree.map(close, got, want)
    assert all(np.abs(x).max(axis=tuple(range(1, x.ndim))).min() > 0 for x in jax.tree.leaves(got[2]))


def test_what_layers_share_gets_no_gradient():
    """Catches a gradient of the context that is some layers' only."""

    def run(w_stack, x, dx, dy_L):
        del dy_L
        of_scale = lambda scale: jnp.sum(over_layers(scan_ahead, "full")(w_stack, x, scale)[0] * dx)
        return jax.grad(of_scale)(sharding.vary(jnp.float32(0.9), AXES))[None]

    np.testing.assert_array_equal(on_mesh(run, SPLIT)(*arrays(2)), np.zeros(n))


# In the passes of a step that gathers weights once --------------------------------------------------------------------


def in_passes(remat: str, counts: bool):
    """fn(w_stack, x, dx, dy): two passes, of x and of 2 x, of which the first goes back last, and adds gradients up.

    counts  whether what the first one found is added too
    Returns the weights it gathered, what it keeps beside, and x, y and the gradients of w_stack and x, each of both.
    """
    one = REMAT[remat](layer)

    def run(w_stack, x_BD, dx, dy_L):
        w_stack, shared = sharding.vary(w_stack, AXES), (jnp.array([4, 0, 2]), 0.9, jax.random.key(5))
        context = 3 + jnp.arange(len(w_stack["up_DF"])), shared
        d_out = dx, {"sum": sharding.vary(dy_L, AXES)}

        def begin(w, x_BD):
            out, pull = jax.vjp(lambda w, x: scan_ahead(one, gather, w, x, context, once=True), w, x_BD)
            return out, *overlap.apart(pull, w)

        (x1, (y1, whole)), kept1, _ = begin(overlap.First(w_stack), x_BD)
        (x2, y2), kept2, how = begin(whole, 2 * x_BD)
        d_whole, dx2 = overlap.together(how, kept2, whole)(d_out)
        slices = jax.tree.map(jnp.zeros_like, w_stack)
        last = overlap.Last(slices, whole, d_whole, sharding.vary(jnp.array(counts), AXES), dx, gather)
        _, _, how = begin(last, x_BD)
        d_last, dx1 = overlap.together(how, kept1, last)(d_out)
        y = y1["sum"][:, None], y2["sum"][:, None]
        d_slices = sharding.psum(d_last.slices, tuple(axis for axis in AXES if axis != FSDP))
        return whole, d_last.beside, (x1, x2), y, d_slices, (dx1, dx2)

    return on_mesh(run, (SPLIT, SPLIT, SPLIT, P(None, AXES), W_SPECS, SPLIT))


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("L", [1, 5])
def test_layers_gathered_once_a_step_are_the_layers(L, remat):
    """Catches a first pass with weights of another layer, or that keeps other things than the later ones; sums of
    another layer, gradients that are not added or not scattered; and an idle stage's that are added."""
    w_stack, x, dx, dy = arrays(L)
    plain = with_gradients(plainly, remat)
    wanted = [plain(w_stack, times * x, dx, dy) for times in (1, 2)]
    whole, beside, *found = in_passes(remat, True)(w_stack, x, dx, dy)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for number, of in ((0, 0), (1, 1), (3, 3)):  # x, y, and the gradient of x
        jax.tree.map(close, found[number], tuple(one[of] for one in wanted))
    jax.tree.map(lambda d, one, two: close(d, one + two), found[2], *(one[2] for one in wanted))
    jax.tree.map(lambda x, w: np.testing.assert_array_equal(x.reshape(n, *w.shape), np.stack([w] * n)), whole, w_stack)
    np.testing.assert_array_equal(beside, dx)
    *_, without, _ = in_passes(remat, False)(w_stack, x, dx, dy)
    jax.tree.map(close, without, wanted[1][2])


def test_of_a_step_that_gathers_once_only_first_and_last_pass_send():
    """Catches weights gathered again by a later pass or by a recomputation, and gradients scattered in each pass."""
    program = in_passes("full", True).lower(*arrays(5)).compile().as_text()
    by = ledger.read(program, {FSDP: n} | {axis: 1 for axis in AXES if axis != FSDP}).by("kind")
    one_gather = 2 * 4 * D * F * (n - 1) // n
    assert (by["all-gather"].count, by["all-gather"].wire_bytes) == (2 * 6, 6 * one_gather)  # the last layer's, again
    assert by["collective-permute"].wire_bytes == 5 * one_gather
    assert set(by) == {"all-gather", "collective-permute"}


def test_what_is_beside_the_last_layer_comes_before_the_loop():
    """Catches a sum that nothing holds to the time in which the last layer's gradients are computed: the compiler then
    sends it when no product is left."""
    traced = jax.make_jaxpr(in_passes("full", True).function)(*arrays(5)).jaxpr
    outer = next(e for e in traced.eqns if "shard_map" in str(e.primitive)).params["jaxpr"]
    at, barrier = [*enumerate(outer.eqns)][[e.primitive.name for e in outer.eqns].index("optimization_barrier")]
    loops_after = [e for e in outer.eqns[at:] if e.primitive.name == "scan"]
    assert any(x in barrier.outvars for e in loops_after for x in e.invars)
    assert outer.outvars[len(W_SPECS)] in barrier.outvars  # what was beside


# What it keeps --------------------------------------------------------------------------------------------------------


def kept(scan, remat: str, L: int) -> collections.Counter:
    """Shapes of all that waits for the way back, and how many of each."""
    found = []

    def run(w_stack, x, dx, dy_L):
        _, pull = jax.vjp(
            lambda w, x: over_layers(scan, remat)(w, x, sharding.vary(jnp.float32(0.9), AXES)), w_stack, x
        )
        found[:] = [leaf.shape for leaf in jax.tree.leaves(pull)]
        return dx

    jax.eval_shape(on_mesh(run, SPLIT).function, *arrays(L))
    return collections.Counter(found)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize("remat", REMAT)
def test_no_gathered_weights_are_kept(remat, L, ends):
    """Catches a loop that keeps every layer's weights, as autodiff of it would; and what full recomputation keeps: the
    input of each layer, and what it was given; of the last one its weights where told. Catches context that the way
    back would know by another type."""
    found = kept(ENDS[ends], remat, L)
    slices = {(L, D // n, F): 1, (L, F, D // n): 1}
    assert found[L, D, F] == found[L, F, D] == 0
    assert found[D, F] == found[F, D] == (ends == "held")
    if remat == "full":
        given = {(L,): 1, (B,): 1, (): 2}  # numbers of layers, ids of tokens, a scale and a key
        streams = {(L, B, D): 1} if ends == "looped" else {(L - 1, B, D): 1, (B, D): 1}
        whole = {(D, F): 1, (F, D): 1} if ends == "held" else {}
        assert found == collections.Counter(streams | whole | slices | given)
    else:
        in_loop = L if ends == "looped" else L - 1
        assert found[in_loop, B, F] >= 1, "nothing more is kept than by full recomputation"
        assert (found[B, F] >= 1) == (ends != "looped"), "nor of the last layer, where it is peeled"


# What it sends, and when ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ends", "L", "gathers", "scatters"), [
    ("looped", 5, 2 * 6, 6), ("peeled", 5, 2 * 5, 5), ("held", 5, 5 + 4, 5), ("peeled", 1, 2, 1), ("held", 1, 1, 1),
])  # fmt: skip
def test_one_layer_more_is_sent_and_none_where_the_ends_are_peeled(ends, L, gathers, scatters):
    """Catches weights gathered twice on the way back, by a recomputation too, gradients that come back whole, and
    anything sent in vain."""
    program = with_gradients(ENDS[ends], "full").lower(*arrays(L)).compile().as_text()
    by = ledger.read(program, {FSDP: n} | {axis: 1 for axis in AXES if axis != FSDP}).by("kind")
    one_gather = 2 * 4 * D * F * (n - 1) // n
    assert (by["all-gather"].count, by["all-gather"].wire_bytes) == (2 * gathers, gathers * one_gather)
    assert by["collective-permute"].wire_bytes == scatters * one_gather
    assert set(by) == {"all-gather", "collective-permute"}


def holds(equation, *primitives: str) -> bool:
    """Whether an equation is one of these primitives, or holds one at any depth."""
    inside = (e for jaxpr in jex.jaxprs_in_params(equation.params) for e in jaxpr.eqns)
    return equation.primitive.name in primitives or any(holds(e, *primitives) for e in inside)


def loops(jaxpr):
    """The bodies of all loops."""
    for equation in jaxpr.eqns:
        for inside in jex.jaxprs_in_params(equation.params):
            yield from [inside] if equation.primitive.name == "scan" else loops(inside)


@pytest.mark.parametrize("ends", ENDS)
def test_nothing_gathered_or_scattered_waits_for_a_product(ends):
    """Catches a loop that gathers a layer's weights when the layer before is over, or scatters gradients where they are
    made: right in all numbers, and as slow as gathering each layer when it is used."""
    traced = jax.make_jaxpr(with_gradients(ENDS[ends], "full").function)(*arrays(5)).jaxpr
    traced, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    forward, backward = (body for body in loops(traced) if any(holds(e, "dot_general") for e in body.eqns))
    for body, exchanges in ((forward, ["all_gather"] * 2), (backward, ["all_gather"] * 2 + ["ppermute"] * 4)):
        late, met = set(), []
        for equation in body.eqns:
            waits = any(isinstance(x, jex.Var) and x in late for x in equation.invars)
            exchange = [name for name in ("all_gather", "ppermute") if holds(equation, name)]
            assert not (waits and exchange), f"{exchange} waits for a product"
            met += exchange
            if waits or holds(equation, "dot_general"):
                late.update(equation.outvars)
        assert collections.Counter(met) == collections.Counter(exchanges)
