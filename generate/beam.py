"""Beam search: the likeliest texts instead of drawn ones.

At each step every beam is continued by every token, and of all these the likeliest stay: beams are rows of one cache,
and a row goes on from what its parent kept. A text that ends leaves its beam; the search ends when `width` have ended,
or there is no more room. With a width of 1 it takes the likeliest token each time.

A text's score is its log-probability over length**penalty, the end of text counted, as transformers has it. GNMT
(arXiv:1609.08144, section 7) divides by ((5 + length) / 6)**penalty instead, which changes less from token to token.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from config import ModelConfig
from generate.cache import NOWHERE, ROWS_DIM, cache_spec
from generate.engine import Engine, Job
from generate.sampling import Settings, log_probabilities
from sharding import BATCH, all_gather
from xla import ordered


@dataclass(frozen=True)
class Beam:
    """A continuation, and the natural logarithm of its probability."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    ended: bool = False  # its last token is the end of text

    def score(self, penalty: float) -> float:
        return self.logprob / len(self.tokens) ** penalty


@functools.cache
def reorder(c: ModelConfig, mesh: Mesh) -> Callable:
    """Compile fn(cache, parents_B) -> the cache whose row i is row parents_B[i] of the old one.

    Sends over BATCH: (n - 1)/n of the cache.
    """

    def shards(cache, parents_b):
        parent = lambda x: jnp.take(all_gather(x, BATCH, dim=ROWS_DIM), parents_b, axis=ROWS_DIM)
        return jax.tree.map(parent, cache)

    spec = cache_spec(c)
    local = jax.shard_map(shards, mesh=mesh, in_specs=(spec, P(BATCH)), out_specs=spec)
    # Written as `empty_cache` writes it, or `cached_forward` would be compiled again.
    return ordered.jit(local, mesh, out_shardings=NamedSharding(mesh, spec))


@functools.partial(jax.jit, static_argnames=("mesh", "count"))
def top_continuations(logits_bV, logprob_b, drawable_V, *, mesh: Mesh, count: int):
    """Of all beams, each continued by all tokens, the likeliest: log-probabilities, parents and tokens, best first."""
    everywhere, vocabulary = NamedSharding(mesh, P()), len(drawable_V)
    logits_bV = jax.lax.with_sharding_constraint(logits_bV, everywhere)
    logprobs_bV = logprob_b[:, None] + log_probabilities(logits_bV, drawable_V)
    logprob_n, at_n = jax.lax.top_k(logprobs_bV.reshape(-1), min(count, logprobs_bV.size))
    return jax.lax.with_sharding_constraint((logprob_n, at_n // vocabulary, at_n % vocabulary), everywhere)


def search(engine: Engine, prompt: list[int], *, width: int, room: int, penalty: float = 1.0) -> list[Beam]:
    """The best continuations of a prompt that a search of so many beams finds, best first, at most `width`.

    engine  idle, of at least `width` slots
    room    most tokens to add
    """
    rows = len(engine.slots)
    assert width <= rows, f"{width} beams do not fit {rows} slots"
    engine.prefill_single(Job(prompt, Settings(temperature=0), 1))
    live, parents, ended = [Beam()], [0] * rows, []
    for step in range(min(room, engine.context - len(prompt))):
        if parents != [*range(rows)]:
            engine.cache = reorder(engine.c, engine.mesh)(engine.cache, np.int32(parents))
        blank = [NOWHERE] * (rows - len(live))
        last_b = [beam.tokens[-1] if beam.tokens else prompt[-1] for beam in live] + [0] * len(blank)
        positions_b = [len(prompt) - 1 + step] * len(live) + blank
        logprob_b = np.float32([beam.logprob for beam in live] + [-np.inf] * len(blank))
        logits_bV, engine.cache = engine.decode_step(
            engine.params, engine.cache, np.int32(last_b)[:, None], np.int32(positions_b)[:, None],
            np.zeros(rows, np.int32))  # fmt: skip
        # Each beam has one continuation that ends: of the 2 * width likeliest, `width` do not.
        found = jax.device_get(
            top_continuations(logits_bV, logprob_b, engine.drawable_V, mesh=engine.mesh, count=2 * width)
        )
        made = [(Beam((*live[parent].tokens, int(token)), float(logprob), bool(token == engine.end)), int(parent))
                for logprob, parent, token in zip(*found, strict=True) if logprob > -np.inf]  # fmt: skip
        ended += [beam for beam, _ in made[:width] if beam.ended]
        goes_on = [(beam, parent) for beam, parent in made if not beam.ended][:width]
        if len(ended) >= width or not goes_on:
            break
        live, parents = [beam for beam, _ in goes_on], [parent for _, parent in goes_on]
        parents += range(len(live), rows)
    else:
        ended += live
    return sorted(ended, key=lambda beam: -beam.score(penalty))[:width]
