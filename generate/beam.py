"""Beam search: find the most likely texts instead of sampling.

Each step extends every beam by every token and keeps the most likely results. Beams are rows of one cache, and a row
continues from a copy of its parent's row. A text that ends frees its beam. The search ends when `width` texts have
ended, or when there is no more room. With a width of 1 it is greedy decoding.

The score of a text is its log-probability / length**penalty. The length includes the end-of-text token, as in
transformers. GNMT (arXiv:1609.08144, section 7) divides by ((5 + length) / 6)**penalty, which varies less with length.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from compile import ordered
from config import ModelConfig
from generate.cache import NOWHERE, ROWS_DIM, cache_spec
from generate.engine import Engine, Job
from generate.request import Settings
from generate.sampling import log_probabilities
from sharding import BATCH, all_gather


@dataclass(frozen=True)
class Beam:
    """A continuation, and the natural logarithm of its probability."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    ended: bool = False  # its last token is end of text

    def score(self, penalty: float) -> float:
        return self.logprob / len(self.tokens) ** penalty


@functools.cache
def reorder(c: ModelConfig, mesh: Mesh) -> Callable:
    """Compile fn(cache, parents_B) -> a cache whose row i is row parents_B[i] of the old one.

    Sends over BATCH, on n devices: (n - 1)/n of the cache.
    """

    def shards(cache, parents_b):
        parent = lambda x: jnp.take(all_gather(x, BATCH, dim=ROWS_DIM), parents_b, axis=ROWS_DIM)
        return jax.tree.map(parent, cache)

    spec = cache_spec(c)
    local = jax.shard_map(shards, mesh=mesh, in_specs=(spec, P(BATCH)), out_specs=spec)
    # Write the sharding exactly as in `empty_cache`, so that `cached_forward` is not recompiled.
    return ordered.jit(local, mesh, out_shardings=NamedSharding(mesh, spec))


@functools.partial(jax.jit, static_argnames=("mesh", "count"))
def top_continuations(logits_bV, logprob_b, drawable_V, *, mesh: Mesh, count: int):
    """Extend all beams by all tokens. Returns the best `count`: log-probabilities, parents and tokens, best first."""
    everywhere, vocabulary = NamedSharding(mesh, P()), len(drawable_V)
    logits_bV = jax.lax.with_sharding_constraint(logits_bV, everywhere)
    logprobs_bV = logprob_b[:, None] + log_probabilities(logits_bV, drawable_V)
    logprob_n, at_n = jax.lax.top_k(logprobs_bV.reshape(-1), min(count, logprobs_bV.size))
    return jax.lax.with_sharding_constraint((logprob_n, at_n // vocabulary, at_n % vocabulary), everywhere)


def search(engine: Engine, prompt: list[int], *, width: int, room: int, penalty: float = 1.0) -> list[Beam]:
    """Return the best continuations of a prompt found with `width` beams, best first, at most `width`.

    engine   an idle engine with at least `width` slots
    room     maximum number of new tokens
    """
    rows = len(engine.slots)
    assert width <= rows, f"{width} beams need as many slots, and the engine has {rows}"
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
        # Only one extension of each beam ends, so at least `width` of the best 2 * width extensions do not.
        best = jax.device_get(
            top_continuations(logits_bV, logprob_b, engine.drawable_V, mesh=engine.mesh, count=2 * width)
        )
        extended = [(Beam((*live[parent].tokens, int(token)), float(logprob), bool(token == engine.end)), int(parent))
                    for logprob, parent, token in zip(*best, strict=True) if logprob > -np.inf]  # fmt: skip
        ended += [beam for beam, _ in extended[:width] if beam.ended]
        unfinished = [(beam, parent) for beam, parent in extended if not beam.ended][:width]
        if len(ended) >= width or not unfinished:
            break
        live, parents = [beam for beam, _ in unfinished], [parent for _, parent in unfinished]
        parents += range(len(live), rows)
    else:
        ended += live
    return sorted(ended, key=lambda beam: -beam.score(penalty))[:width]
