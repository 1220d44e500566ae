"""Compute a model's log-probabilities of given tokens, on any mesh. Only a few shapes are compiled.

The logits of a whole batch are never materialized. Each device computes the logits of its vocabulary shard for one
chunk of tokens at a time, and reduces them to four numbers per token, which are combined over the devices.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import model
import sharding
from architectures import architecture
from compile import ordered
from config import Config, replace
from generate.texts import round_up_to_power_of_two
from overlap.weights import ready_for_autodiff
from pipeline import fit
from pipeline.step import on_mesh, run_stages
from pipeline.ticks import keep_last_stage, loss_input
from sharding import BATCH, CONTEXT, STAGE, TENSOR, all_gather, axis_index, psum, to_sequence_order
from utils import UserError

READS = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT")
LEAST_POSITIONS = 16  # positions of the smallest shape that is compiled

# Context tokens, at least one, and the tokens to score after them. An encoder reads all context tokens but the last,
# with which the decoder starts.
Pair = tuple[list[int], list[int]]
Score = tuple[float, bool]  # log-probability, and whether each token is the most likely one


# On the mesh ----------------------------------------------------------------------------------------------------------


def local_logit_stats(logits_nv, targets_n):
    """Reduce the logits of this device's vocabulary shard to their log-sum-exp, the target's logit (0 if it is in
    another shard), the largest logit, and its token id (the lowest in a tie)."""
    words_v = axis_index(TENSOR) * logits_nv.shape[1] + jnp.arange(logits_nv.shape[1])
    target_n = jnp.sum(jnp.where(words_v[None] == targets_n[:, None], logits_nv, 0), axis=1)
    best_n = words_v[jnp.argmax(logits_nv, axis=1)]
    return jax.nn.logsumexp(logits_nv, axis=1), target_n, jnp.max(logits_nv, axis=1), best_n


def combine_logit_stats(log_sum_n, target_n, top_n, best_n, targets_n):
    """Combine the statistics over TENSOR: the target's log-probability, and whether it is the most likely token.

    Sends over TENSOR: five numbers per token.
    """
    most_n, above_n = (jax.lax.pmax(x_n, TENSOR) for x_n in (log_sum_n, top_n))
    log_sum_n = most_n + jnp.log(psum(jnp.exp(log_sum_n - most_n), TENSOR))
    first_n = jax.lax.pmin(jnp.where(top_n == above_n, best_n, np.iinfo(np.int32).max), TENSOR)
    return psum(target_n, TENSOR) - log_sum_n, first_n == targets_n


def compile_scores(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> (log-probability [B, T] of targets_BT, whether each is the most likely [B, T]).

    Every process gets all results. Logits of only work.loss_chunk tokens exist at a time. Mixtures of experts are
    dropless, whatever capacity_factor they were trained with, so scores do not depend on the other texts in a batch.
    Raises: UserError if a parameter does not split over the mesh.
    """
    cfg = replace(cfg, **{"model.capacity_factor": 0.0})
    fit.check(cfg.model, cfg.mesh)
    c = cfg.at_work

    def local_scores(params, batch, step):
        w = ready_for_autodiff(params, c)
        x, _ = run_stages(w, c, batch, None, 1)
        x_bsD = model.final_norm(w, c, loss_input(x), dim=1)
        b, s, D = x_bsD.shape
        n = max(n for n in range(1, min(b * s, c.work.loss_chunk) + 1) if b * s % n == 0)
        table_Dv, cut = model.unembedding(w, c), lambda x, *dims: x.reshape(-1, n, *dims)
        logits = lambda x_nD: model.add_bias((x_nD @ table_Dv).astype(jnp.float32), w.bias_V)
        of_some = lambda some: local_logit_stats(logits(some[0]), some[1])
        known = jax.lax.map(of_some, (cut(x_bsD, D), cut(batch["targets_BT"])))
        found = combine_logit_stats(*(x.reshape(b, s) for x in known), batch["targets_BT"])
        return jax.tree.map(whole, found)

    def whole(x_bs):
        x_bS = to_sequence_order(all_gather(psum(keep_last_stage(x_bs), STAGE), CONTEXT, dim=1, to="invarying"), dim=1)
        return all_gather(x_bS, BATCH, dim=0, to="invarying")

    return ordered.jit(on_mesh(cfg, mesh, local_scores, (P(), P()), READS, sums=False), mesh)


# Texts of any length --------------------------------------------------------------------------------------------------


def to_row(pair: Pair, most: int) -> tuple[list[int], list[int]]:
    """Return the inputs and targets of a pair, cut from the left to at most `most` positions."""
    tokens = [*pair[0], *pair[1]][-(most + 1) :]
    return tokens[:-1], tokens[1:]


class Scorer:
    """Scores texts with a model.

    rows  texts per batch, over all devices
    """

    def __init__(self, cfg: Config, params, mesh: Mesh, rows: int = 32):
        self.params, self.mesh, self.max_tokens = params, mesh, cfg.data.seq_len
        self.input_len, self.names = cfg.data.input_len, architecture(cfg.model).batch
        self.rows = -(-rows // cfg.mesh.batch_shards) * cfg.mesh.batch_shards
        # Positions are sharded over context * tensor devices, with two chunks per context device.
        self.multiple = np.lcm(cfg.mesh.position_shards, 2 * cfg.mesh.context if cfg.mesh.context > 1 else 1)
        self.scores = compile_scores(cfg, mesh)

    def positions(self, length: int) -> int:
        """Return the padded positions of a batch with this longest row: a power of two, or the maximum."""
        T = round_up_to_power_of_two(max(length, LEAST_POSITIONS), max(self.max_tokens, LEAST_POSITIONS))
        return int(-(-T // self.multiple) * self.multiple)

    def score(self, pairs: list[Pair]) -> Iterator[tuple[int, Score]]:
        """Yield the index and score of each pair, longest first. Long pairs are cut from the left.

        Raises: UserError if a continuation is longer than data.seq_len.
        """
        for context, continuation in pairs:
            assert context, "a pair needs at least one context token, because a first token has no probability"
            if len(continuation) > self.max_tokens:
                raise UserError(f"{len(continuation)} tokens to score do not fit in "
                                f"data.seq_len={self.max_tokens}; "
                                f"use --seq_len {len(continuation)}")  # fmt: skip
        rows = [to_row((pair[0][-1:], pair[1]) if self.input_len else pair, self.max_tokens) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda n: -len(rows[n][0]))
        for first in range(0, len(order), self.rows):
            numbers = order[first : first + self.rows]
            found = self.score_batch([rows[n] for n in numbers], [pairs[n] for n in numbers])
            for n, log_T, best_T in zip(numbers, *found, strict=False):  # the batch is padded with empty rows
                end = len(rows[n][0])
                part = slice(end - len(pairs[n][1]), end)
                yield n, (float(np.sum(log_T[part], dtype=np.float64)), bool(np.all(best_T[part])))

    def score_batch(self, rows: list[tuple[list[int], list[int]]], pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray]:
        """Score the targets of padded rows: log-probabilities [B, T], and whether each is the most likely token."""
        B, T = self.rows, self.positions(max(len(inputs) for inputs, _ in rows))
        batch = {name: np.zeros((B, T), np.int32) for name in READS}
        batch["positions_BT"][:] = np.arange(T)
        for row, (inputs, targets) in enumerate(rows):
            batch["tokens_BT"][row, : len(inputs)] = inputs
            batch["targets_BT"][row, : len(targets)] = targets
            batch["segments_BT"][row, : len(inputs)] = 1
        batch |= self.bidirectional_arrays(rows, pairs, batch["tokens_BT"].shape)
        log_BT, best_BT = self.scores(self.params, sharding.put(batch, self.mesh))
        return np.asarray(log_BT), np.asarray(best_BT)

    def bidirectional_arrays(self, rows, pairs: list[Pair], shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return the arrays of an encoder, whose inputs are the contexts, or of a prefix LM; none for other models."""
        found = {name: np.zeros((shape[0], self.input_len or shape[1]), np.int32) for name in self.names}
        for row, ((inputs, _), (context, continuation)) in enumerate(zip(rows, pairs, strict=True)):
            if "prefix_BT" in found:
                found["prefix_BT"][row, : len(inputs) + 1 - len(continuation)] = 1
            elif found:
                read = context[:-1][-self.input_len :]
                found["encoder_tokens_BS"][row, : len(read)] = read
                found["encoder_segments_BS"][row, : len(read)] = 1
        return found
