"""Continuous batching: a finished request leaves the batch, a waiting one enters, and nothing is recompiled.

An engine has a fixed number of slots, each a row of the KV cache. A step generates one token for every text in progress
(decode), then processes some chunks of prompts (prefill). These are two compiled functions with one shape each, for any
lengths. The result of a request depends on its tokens, settings and seed, and on no other request.

A row keeps its prompt in the cache until another prompt replaces it. If a new prompt shares a prefix with a cached one,
the chunks of the prefix are copied, so n samples of a prompt prefill it once. A copy is bitwise identical to a prefill,
because all prompts are split into chunks of the same size. With sliding windows, a row that has gone on past a prefix
has overwritten its positions one by one, so it is only copied if it still has the window before the next chunk.
"""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from architectures import architecture
from config import Config
from config.fields import parse_window
from generate.cache import NOWHERE, cached_forward, cached_slots, copy_rows, empty_cache, unstack
from generate.request import Settings
from generate.sampling import BatchSettings, DrawnTokens, choose, drawable_ids, score_tokens
from sharding import BATCH, CONTEXT
from utils import UserError


def common_prefix_length(one: list[int], other: list[int]) -> int:
    """Return the number of tokens in the common prefix of two lists."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differ[0]) if len(differ) else n


@dataclasses.dataclass
class Token:
    """A token, its log-probability in the model, and the most likely alternatives with their log-probabilities."""

    id: int
    logprob: float
    alternatives: list[tuple[int, float]]

    @classmethod
    def from_row(cls, chosen: DrawnTokens, row: int, alternatives: int):
        """Return the token of one row, with at most `alternatives` alternatives."""
        pairs = zip(chosen.likeliest_bA[row].tolist(), chosen.logprobs_bA[row].tolist(), strict=True)
        likely = [(id, logprob) for id, logprob in pairs if logprob != -math.inf]  # -inf: unused ids
        return cls(int(chosen.token_b[row]), float(chosen.logprob_b[row]), likely[:alternatives])


class Job:
    """One request: its prompt, the tokens generated so far, and why it ended.

    ended          "" while it runs; "stop" at end of text, "length" when it has max_new_tokens, or "cancelled"
    prompt_tokens  None, or a list that receives the scored tokens of the prompt, except the first
    """

    def __init__(self, prompt: list[int], settings: Settings, room: int):
        self.prompt, self.settings, self.max_new_tokens = prompt, settings, room
        self.tokens_read = 0  # tokens of the prompt that are in the cache
        self.tokens: list[Token] = []
        self.prompt_tokens: list[Token] | None = None
        self.end_token: Token | None = None  # the end-of-text token, if it was generated
        self.ended = ""

    def add_token(self, token: Token, end: int) -> None:
        """Add a generated token. The end-of-text token ends the job and is not added."""
        if token.id == end:
            self.ended, self.end_token = "stop", token
            return
        self.tokens.append(token)
        if len(self.tokens) == self.max_new_tokens:
            self.ended = "length"


class Engine:
    """A model with a fixed number of slots for requests.

    params          None: `load` sets them later
    vocabulary      number of ids that may be generated, from 0; the model's table may be longer
    end             the token that ends a text
    slots           requests at a time; rounded up to a multiple of the devices along BATCH
    context         maximum tokens of a prompt and its text; cache rows are rounded up to a multiple of CONTEXT devices
    piece           prompt tokens per prefill chunk; an encoder or a prefix LM reads each prompt in one chunk
    prefill_tokens  maximum prompt tokens between two decode steps, but always at least one chunk
    cache           number format, see `cache_shapes`
    unused_ids      ids below `vocabulary` that are not tokens, and never generated
    """

    def __init__(self, cfg: Config, params, mesh: Mesh, *, vocabulary: int, end: int, slots: int, context: int = 0,
                 piece: int = 64, prefill_tokens: int = 512, cache: str = "compute",
                 unused_ids: Sequence[int] = ()):  # fmt: skip
        c = cfg.model
        self.c, self.mesh, self.vocabulary, self.end = c, mesh, vocabulary, end
        self.groups = math.prod(mesh.shape[axis] for axis in BATCH)
        self.context, slots = context or cfg.data.seq_len, slots + -slots % self.groups
        self.piece = self.context if architecture(c).whole_prompt else min(piece, self.context)
        self.chunks_per_step = max(1, prefill_tokens // (piece * self.groups))
        self.slots: list[Job | None] = [None] * slots
        self.waiting: deque[Job] = deque()
        rows_of = self.context + -self.context % mesh.shape[CONTEXT]
        # One slot more than a call needs: a row that has decoded a token since its last chunk can still be copied.
        self.empty_cache = lambda: empty_cache(c, mesh, slots, rows_of, cache, self.piece + 1)
        self.rolling_slots = cached_slots(c, mesh, rows_of, self.piece + 1, ())
        self.load(params)
        everywhere = NamedSharding(mesh, P())
        self.seen_bV = jnp.zeros((slots, vocabulary), bool, device=everywhere)
        self.drawable_V = jax.device_put(drawable_ids(vocabulary, unused_ids), everywhere)
        self.prefill, self.decode_step = cached_forward(c, mesh, rows=True), cached_forward(c, mesh)
        self.copy = copy_rows(c, mesh)

        def draw(logits_nV, asked: BatchSettings, seen_bV, rows_n, drawable_V):
            whole_nV = jax.lax.with_sharding_constraint(logits_nV, everywhere)
            chosen = choose(whole_nV, asked, seen_bV[rows_n], drawable_V)
            return chosen, seen_bV.at[rows_n, chosen.token_b].set(True, mode="drop")

        def score(logits_nmV, targets_nm, drawable_V):
            whole_nmV = jax.lax.with_sharding_constraint(logits_nmV, everywhere)
            return score_tokens(whole_nmV.reshape(-1, whole_nmV.shape[-1]), targets_nm.reshape(-1), drawable_V)

        self.score = jax.jit(score, out_shardings=everywhere)
        set_row = lambda seen_bV, row, seen_V: seen_bV.at[row].set(seen_V)
        self.draw = jax.jit(draw, out_shardings=everywhere, donate_argnums=2)
        self.set_row = jax.jit(set_row, out_shardings=everywhere, donate_argnums=0)

    def load(self, params) -> None:
        """Use these parameters from now on, and drop all requests. None: free the parameters and the cache."""
        self.slots = [None] * len(self.slots)
        self.waiting.clear()
        self.params = params if params is None else unstack(params, self.c, self.mesh)
        self.cache = params if params is None else self.empty_cache()
        self.cached_prompts: list[list[int]] = [[]] * len(self.slots)  # the prompt tokens in each row of the cache
        self.ends_b = np.zeros(len(self.slots), np.int32)  # end of the positions written since a row's text began

    def submit(self, job: Job) -> Job:
        """Queue a request for a slot. Raises: UserError if its prompt leaves no room for a new token."""
        if job.prompt_tokens is not None and not architecture(self.c).continues_prompt:
            raise UserError("an encoder-decoder does not score its prompt, because it does not predict its inputs")
        if len(job.prompt) >= self.context:
            raise UserError(f"a prompt of {len(job.prompt)} tokens leaves no room in {self.context} positions")
        job.max_new_tokens = min(job.max_new_tokens, self.context - len(job.prompt))
        self.waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request; its slot is free at the next step."""
        job.ended = job.ended or "cancelled"

    @property
    def running(self) -> int:
        return sum(job is not None for job in self.slots)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def step(self) -> list[Job]:
        """Decode one token for every text in progress, then prefill. Returns the jobs that got a token or ended."""
        self.admit_jobs()
        decoding = [job is not None and job.tokens_read == len(job.prompt) for job in self.slots]
        drawn = self.run_decode(decoding) if any(decoding) else []
        for _ in range(self.chunks_per_step):
            reading = self.next_prefills()
            if not any(job is not None for job in reading):
                break
            drawn += self.run_prefill(reading)
        self.slots = [None if job is not None and job.ended else job for job in self.slots]
        return drawn

    def prefill_single(self, job: Job) -> Job:
        """Prefill a prompt in row 0 of an idle engine and sample one token; the caller continues from this cache."""
        assert self.idle, "the engine has requests in progress"
        self.submit(job)
        while not (job.tokens or job.ended):
            self.step()
        self.slots[0], self.cached_prompts = None, [[]] * len(self.slots)
        return job

    def admit_jobs(self) -> None:
        """Free the slots of jobs that have ended, and assign them to waiting jobs."""
        for row, job in enumerate(self.slots):
            if job is not None and job.ended:
                self.slots[row] = job = None
            while job is None and self.waiting:
                if not (first := self.waiting.popleft()).ended:
                    self.slots[row] = job = first
                    if job.settings.repetition_penalty != 1:
                        seen_V = np.isin(np.arange(self.vocabulary), job.prompt)
                        self.seen_bV = self.set_row(self.seen_bV, row, seen_V)

    def next_prefills(self) -> list[Job | None]:
        """For each device along BATCH, return its first job whose prompt is not completely in the cache, or None."""
        per_group, found = len(self.slots) // self.groups, []
        for group in range(self.groups):
            rows = self.slots[group * per_group : (group + 1) * per_group]
            found.append(next((job for job in rows if job is not None and job.tokens_read < len(job.prompt)), None))
        # The program that scores whole chunks may round differently, so jobs without scores never share it.
        kinds = [job.prompt_tokens is None for job in found if job is not None]
        return [job if job is not None and (job.prompt_tokens is None) == kinds[0] else None for job in found]

    def copy_shared_prefixes(self, reading: list[Job | None]) -> None:
        """For each prompt that is about to start, copy its cached prefix from a row on the same device along BATCH."""
        n, per_group = len(reading), len(self.slots) // self.groups
        from_n, to_n = np.zeros(n, np.int32), np.zeros(n, np.int32)
        for i, job in enumerate(reading):
            if job is not None and not job.tokens_read and job.prompt_tokens is None:
                mine = range(i * per_group, (i + 1) * per_group)
                begun = functools.partial(self.shared_tokens, job.prompt)
                best = max(mine, key=begun)
                job.tokens_read = begun(best)
                if job.tokens_read:
                    from_n[i], to_n[i] = best % per_group, self.slots.index(job) % per_group
                    self.ends_b[self.slots.index(job)] = self.ends_b[best]
        if np.any(from_n != to_n):
            self.cache = self.copy(self.cache, from_n, to_n)

    def shared_tokens(self, prompt: list[int], row: int) -> int:
        """Return how many tokens of a prompt a copy of a row would provide: whole chunks, but not the last token."""
        shared = common_prefix_length(prompt[:-1], self.cached_prompts[row]) // self.piece * self.piece
        first_needed = max(0, shared + 1 - parse_window(self.c.window).size)  # by the next token, in its window
        return shared if self.ends_b[row] <= first_needed + self.rolling_slots else 0

    def run_prefill(self, reading: list[Job | None]) -> list[Job]:
        """Prefill one chunk of each prompt. After its last chunk, sample the first token."""
        self.copy_shared_prefixes(reading)
        n, per_group = len(reading), len(self.slots) // self.groups
        tokens_ns = np.zeros((n, self.piece), np.int32)
        positions_ns = np.full((n, self.piece), NOWHERE, np.int32)
        last_n, at_n, done = np.zeros(n, np.int32), np.zeros(n, np.int32), [None] * n
        for i, job in enumerate(reading):
            if job is not None:
                ids = job.prompt[job.tokens_read : job.tokens_read + self.piece]
                tokens_ns[i, : len(ids)] = ids
                positions_ns[i, : len(ids)] = np.arange(job.tokens_read, job.tokens_read + len(ids))
                row = self.slots.index(job)
                last_n[i], at_n[i] = len(ids) - 1, row % per_group
                self.ends_b[row] = max(job.tokens_read and self.ends_b[row], job.tokens_read + len(ids))
                job.tokens_read += len(ids)
                self.cached_prompts[row] = job.prompt[: job.tokens_read]
                done[i] = job if job.tokens_read == len(job.prompt) else None
        scored = any(job is not None and job.prompt_tokens is not None for job in reading)
        wanted = np.tile(np.arange(self.piece, dtype=np.int32), (n, 1)) if scored else last_n
        logits_nV, self.cache = self.prefill(self.params, self.cache, tokens_ns, positions_ns, wanted, at_n)
        if scored:
            self.score_prompts(reading, logits_nV)
            logits_nV = logits_nV[np.arange(n), last_n]
        rows = [i * per_group + int(at_n[i]) for i in range(n)]
        return self.draw_tokens(logits_nV, done, rows) if any(job is not None for job in done) else []

    def score_prompts(self, reading: list[Job | None], logits_nmV) -> None:
        """Score the tokens that follow each token of the chunks just prefilled."""
        m, targets_nm, after = self.piece, np.zeros(logits_nmV.shape[:2], np.int32), []
        for i, job in enumerate(reading):
            begin = (job.tokens_read - 1) // m * m if job is not None else 0
            after.append(job.prompt[begin + 1 : begin + m + 1] if job is not None else [])
            targets_nm[i, : len(after[-1])] = after[-1]
        chosen = jax.device_get(self.score(logits_nmV, targets_nm, self.drawable_V))
        for i, job in enumerate(reading):
            for j in range(len(after[i])):
                job.prompt_tokens.append(Token.from_row(chosen, i * m + j, job.settings.logprobs))

    def run_decode(self, decoding: list[bool]) -> list[Job]:
        """Sample the next token of each text in progress."""
        jobs = [job if on else None for job, on in zip(self.slots, decoding, strict=True)]
        last = lambda job: (job.tokens[-1].id, len(job.prompt) + len(job.tokens) - 1)
        tokens_b, positions_b = zip(*((0, NOWHERE) if job is None else last(job) for job in jobs), strict=True)
        logits_bV, self.cache = self.decode_step(
            self.params, self.cache, np.int32(tokens_b)[:, None], np.int32(positions_b)[:, None],
            np.zeros(len(jobs), np.int32))  # fmt: skip
        self.ends_b = np.maximum(self.ends_b, [0 if at == NOWHERE else at + 1 for at in positions_b])
        return self.draw_tokens(logits_bV, jobs, range(len(jobs)))

    def draw_tokens(self, logits_nV, jobs: list[Job | None], rows) -> list[Job]:
        """Sample a token for each job from its logits. rows: the slot of each job"""
        asked = BatchSettings.from_rows([job and (job.settings, len(job.tokens)) for job in jobs], self.vocabulary)
        rows_n = np.int32([len(self.slots) if job is None else row for job, row in zip(jobs, rows, strict=True)])
        chosen, self.seen_bV = self.draw(logits_nV, asked, self.seen_bV, rows_n, self.drawable_V)
        chosen = jax.device_get(chosen)
        for n, job in enumerate(jobs):
            if job is not None and job.max_new_tokens:
                job.add_token(Token.from_row(chosen, n, job.settings.logprobs), self.end)
            elif job is not None:  # max_new_tokens=0 only scores the prompt
                job.ended = job.ended or "length"
        return [job for job in jobs if job is not None]
