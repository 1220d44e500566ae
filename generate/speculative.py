"""Speculative decoding: a small draft model proposes k tokens, and the model checks them all in one step.

A decode step reads every weight for one token, and costs about as much for a few tokens. The acceptance rule keeps the
text distributed exactly as if the model alone sampled it, so a bad draft only costs time. The distributions of both
models include temperature, top_k, top_p, min_p and penalty.

Source: Leviathan et al., arXiv:2211.17192, algorithm 1.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from generate.cache import NOWHERE
from generate.engine import Engine, Job, Token
from generate.request import Settings
from generate.sampling import (
    BatchSettings,
    DrawnTokens,
    alternatives,
    filter_logits,
    log_probabilities,
    mask_unused,
    penalize,
)

PROPOSED, ACCEPTED, REPLACED = range(3)  # purposes of random numbers: each has its own key


def random_key(asked: BatchSettings, purpose: int):
    of_row = jax.random.fold_in(jax.random.key(asked.seed[0]), asked.count[0])
    return jax.random.fold_in(of_row, purpose)


def probabilities(logits_bV, asked: BatchSettings, seen_bV):
    """Return the distribution that `sampling.choose` samples from."""
    less_bV = penalize(logits_bV, asked.repetition_penalty, seen_bV)
    likeliest_bV = jax.nn.one_hot(jnp.argmax(less_bV, axis=-1), less_bV.shape[-1])
    return jnp.where(asked.temperature[:, None] > 0, jax.nn.softmax(filter_logits(less_bV, asked)), likeliest_bV)


def draw_token(key, probability_V):
    return jnp.argmax(jnp.log(probability_V) + jax.random.gumbel(key, probability_V.shape))


@functools.partial(jax.jit, static_argnames="mesh")
def propose(logits_bV, asked: BatchSettings, seen_1V, drawable_V, *, mesh: Mesh):
    """Sample a token from the draft's logits. Returns it (for every row), its distribution, and the updated seen_1V."""
    everywhere = NamedSharding(mesh, P())
    logits_1V = mask_unused(jax.lax.with_sharding_constraint(logits_bV, everywhere)[:1], drawable_V)
    q_V = probabilities(logits_1V, asked, seen_1V)[0]
    token = draw_token(random_key(asked, PROPOSED), q_V)
    made = jnp.full((len(logits_bV), 1), token, jnp.int32), q_V, seen_1V.at[0, token].set(True)
    return jax.lax.with_sharding_constraint(made, everywhere)


@functools.partial(jax.jit, static_argnames="mesh")
def verify(logits_bmV, proposed_k, q_kV, asked: BatchSettings, seen_1V, drawable_V, *, mesh: Mesh):
    """Accept or reject the k proposed tokens, and sample one more after the accepted tokens.

    logits_bmV  the model's logits before each proposed token and after the last: m = k + 1
    Returns: the number n of new tokens, 1 to m; an array of m tokens, of which the first n count; and seen_1V.
    """
    everywhere, k = NamedSharding(mesh, P()), len(proposed_k)
    whole_mV = jax.lax.with_sharding_constraint(logits_bmV, everywhere)[0]
    logits_mV = mask_unused(whole_mV, drawable_V)
    seen_kV = jnp.cumsum(jax.nn.one_hot(proposed_k, len(drawable_V), dtype=jnp.int32), axis=0) > 0
    seen_mV = seen_1V | jnp.pad(seen_kV, ((1, 0), (0, 0)))
    of_rows = jax.tree.map(lambda x_1: jnp.repeat(x_1, k + 1), asked)
    p_mV = probabilities(logits_mV, of_rows, seen_mV)

    of_proposed = lambda x_kV: jnp.take_along_axis(x_kV, proposed_k[:, None], axis=-1)[:, 0]
    uniform_k = jax.random.uniform(random_key(asked, ACCEPTED), (k,))
    kept_k = uniform_k * of_proposed(q_kV) < of_proposed(p_mV[:k])  # with probability min(1, p / q)
    n = jnp.sum(jnp.cumprod(kept_k))
    left_V = jnp.maximum(p_mV - jnp.pad(q_kV, ((0, 1), (0, 0))), 0)[n]  # p itself if all are accepted
    last = draw_token(random_key(asked, REPLACED), left_V)  # the weights need not sum to 1

    token_m = jnp.where(jnp.arange(k + 1) < n, jnp.pad(proposed_k, (0, 1)), last)
    logprobs_mV = log_probabilities(whole_mV, drawable_V)
    logprob_m = jnp.take_along_axis(logprobs_mV, token_m[:, None], axis=-1)[:, 0]
    chosen = DrawnTokens(token_m, logprob_m, *alternatives(logprobs_mV, of_rows)[::-1])
    made = n + 1, chosen, seen_mV[n][None].at[0, last].set(True)
    return jax.lax.with_sharding_constraint(made, everywhere)


def next_logits(engine: Engine, tokens_bs, at: int, wanted_m):
    """Run tokens through row 0 from position `at` on. Returns logits [b, m, V] after the tokens wanted_m."""
    positions_bs = np.full(tokens_bs.shape, NOWHERE, np.int32)
    positions_s = at + np.arange(tokens_bs.shape[1])
    positions_bs[0] = np.where(positions_s < engine.context, positions_s, NOWHERE)  # a text ends before the others
    wanted_bm = np.tile(np.int32(wanted_m), (len(tokens_bs), 1))
    logits_bmV, engine.cache = engine.decode_step(engine.params, engine.cache, tokens_bs, positions_bs, wanted_bm)
    return logits_bmV


@dataclass
class Rounds:
    """Counts the model's steps and the tokens they yielded. Without a draft, each step yields one token."""

    steps: int = 0
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


def speculate(engine: Engine, draft: Engine, job: Job, k: int, on_token: Callable[[], None] = lambda: None) -> Rounds:
    """Continue one text to its end with k proposed tokens per step. `on_token()` is called after each new token.

    engine, draft  both idle, with the same vocabulary; their shapes are the same in every round
    Cache entries of rejected tokens are overwritten before they are attended to. In a rolling cache they have replaced
    only positions before the next windows, because it has slots for more than k tokens after a window.
    """
    for one in (engine, draft):
        assert not one.c.window or k < one.piece or one.piece == one.context, f"{k} tokens, in chunks of {one.piece}"
    engine.prefill_single(job), draft.prefill_single(Job(job.prompt, Settings(temperature=0), 1))
    on_token()
    rounds, seen_1V = Rounds(), engine.seen_bV[:1]
    common = dict(drawable_V=engine.drawable_V, mesh=engine.mesh)
    rows = lambda engine, ids: np.tile(np.int32(ids), (len(engine.slots), 1))
    while not job.ended:
        text, count = [*job.prompt, *(token.id for token in job.tokens)], len(job.tokens)
        asked = lambda more, count=count: BatchSettings.from_rows([(job.settings, count + more)], engine.vocabulary)
        # If all k tokens were accepted, the draft has not read the last one, so it always reads the last two.
        tokens_bs, seen_with_1V, proposed, q = rows(draft, text[-2:]), seen_1V, [], []
        for n in range(k):
            s = tokens_bs.shape[1]
            logits_b1V = next_logits(draft, tokens_bs, len(text) + n - s, [s - 1])
            tokens_bs, q_V, seen_with_1V = propose(logits_b1V[:, 0], asked(n), seen_with_1V, **common)
            proposed.append(tokens_bs), q.append(q_V)
        tokens_bm = jnp.concatenate([rows(draft, text[-1:]), *proposed], axis=1)
        logits_bmV = next_logits(engine, tokens_bm, len(text) - 1, range(k + 1))
        n, chosen, seen_1V = verify(logits_bmV, tokens_bm[0, 1:], jnp.stack(q), asked(0), seen_1V, **common)
        n, chosen = jax.device_get((n, chosen))
        rounds.steps += 1
        for at in range(n):
            job.add_token(Token.from_row(chosen, at, job.settings.logprobs), engine.end)
            rounds.tokens += 1
            on_token()
            if job.ended:
                break
    return rounds
