"""Sampling with a cache: `python generate.py runs/laptop --prompt "def "`.

A prompt goes through the model once (prefill), then every new token alone (decode): what attention needs of earlier
tokens is kept. Latent attention keeps its latents and rotary keys only; the projections from the latent to keys and
values are absorbed into query and output (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Prefill and decode are one
function, `extend`: s new tokens attend to the S slots of the cache. Mixtures of experts are dropless here, whatever
capacity_factor they were trained with. It runs on one device.
"""

import codecs
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tiktoken
import tyro
from jax.sharding import PartitionSpec as P

import checkpoint
import model
import sharding
import utils
from data import tokenizers
from model import gathered
from sharding import BATCH, CONTEXT, STAGE, TENSOR, all_gather, reduce_scatter, vary
from utils import Config, ModelConfig, UserError

# The cache ------------------------------------------------------------------------------------------------------------


@sharding.weights
class LatentCache:
    """What latent attention keeps of each position: C + R numbers, whatever the number of heads."""

    latent_bSC: jax.Array
    rotary_bSR: jax.Array


@sharding.weights
class GroupedCache:
    """What grouped-query attention keeps of each position: a key and a value for each of the G heads."""

    key_bSgK: jax.Array
    value_bSgK: jax.Array


def empty_cache(c: ModelConfig, b: int, slots: int):
    """Zeros for every layer, stacked as the layers are: {"prefix": [P, ..], "dense": [L, J, ..], "moe": [L, ..]}."""
    dtype = c.precision.compute

    def layers(*stacked):
        zeros = lambda *shape: jnp.zeros((*stacked, b, slots, *shape), dtype)
        if c.attention == "mla":
            return LatentCache(zeros(c.d_kv_latent), zeros(c.d_rope))
        return GroupedCache(zeros(c.n_kv_heads, c.d_head), zeros(c.n_kv_heads, c.d_head))

    n_dense = c.layers_per_block - bool(c.n_experts)
    blocks = {"dense": layers(c.n_blocks, n_dense) if n_dense else None,
              "moe": layers(c.n_blocks) if c.n_experts else None}  # fmt: skip
    return {"prefix": layers(c.dense_prefix) if c.dense_prefix else None, "blocks": blocks}


def write(cache_bSX, new_bsX, positions_bs):
    """Put what new tokens leave into the slots of their positions; a position past the last slot is not written."""
    b = len(new_bsX)
    return cache_bSX.at[jnp.arange(b)[:, None], positions_bs].set(new_bsX, mode="drop")


def slots_seen(positions_bs, slots: int):
    """Slot i holds position i; a token sees the slots up to its own. Shape: [b, s, S]."""
    return positions_bs[:, :, None] >= jnp.arange(slots)[None, None, :]


def cached_latent_attention(w: model.LatentAttention, c: ModelConfig, x_bsD, positions_bs, cache, rotary_on):
    """Attend from new tokens to the cache. Returns a partial sum over TENSOR, and the cache with the new tokens.

    A score is q_K . (w_key latent_C) = (w_key^T q_K) . latent_C: with the query moved to the latent's width, keys are
    never made. The same for values, after the mixing.
    """
    q_bshK, q_bshR = model.latent_queries(w, c, x_bsD, positions_bs, rotary_on)
    latent_bsC, rotary_bsR = model.latents(w, c, x_bsD, positions_bs, rotary_on)
    cache = LatentCache(write(cache.latent_bSC, latent_bsC, positions_bs),
                        write(cache.rotary_bSR, rotary_bsR, positions_bs))  # fmt: skip
    q_bshC = jnp.einsum("bshK,ChK->bshC", q_bshK, gathered(w.w_key_CHK, c, dim=0))
    scale = (c.d_head + c.d_rope) ** -0.5
    q_bshX = jnp.concatenate([q_bshC, q_bshR], axis=-1) * scale
    k_bSX = jnp.concatenate([cache.latent_bSC, cache.rotary_bSR], axis=-1)
    scores_bhsS = jnp.einsum("bshX,bSX->bhsS", q_bshX, k_bSX)
    attention_bhsS = model.masked_softmax(scores_bhsS, slots_seen(positions_bs, k_bSX.shape[1]))
    o_bshC = jnp.einsum("bhsS,bSC->bshC", attention_bhsS, cache.latent_bSC)
    o_bshU = jnp.einsum("bshC,ChU->bshU", o_bshC, gathered(w.w_value_CHU, c, dim=0))
    return jnp.einsum("bshU,hUD->bsD", o_bshU, gathered(w.w_out_HUD, c, dim=2)), cache


def cached_grouped_attention(w: model.GroupedAttention, c: ModelConfig, x_bsD, positions_bs, cache, rotary_on):
    """Attend from new tokens to the cache. Returns a partial sum over TENSOR, and the cache with the new tokens."""
    q_bshK, k_bsgK, v_bsgK = model.queries_keys_values(w, c, x_bsD, positions_bs, rotary_on)
    cache = GroupedCache(write(cache.key_bSgK, k_bsgK, positions_bs), write(cache.value_bSgK, v_bsgK, positions_bs))
    mask_bsS = slots_seen(positions_bs, cache.key_bSgK.shape[1])
    k_bShK, v_bShK = model.repeated(c, cache.key_bSgK), model.repeated(c, cache.value_bSgK)
    o_bshK = model.attend(q_bshK, k_bShK, v_bShK, mask_bsS)
    return jnp.einsum("bshK,hKD->bsD", o_bshK, gathered(w.w_out_HKD, c, dim=2)), cache


# The model, a few tokens at a time ------------------------------------------------------------------------------------


def cached_layer(w: model.Layer, c: ModelConfig, x_btD, positions_bs, cache, number):
    """One layer, as `model.layer`, attending to the cache. Returns [b, t, D] and the cache with the new tokens."""
    h_bsD = all_gather(model.rms_norm(x_btD, w.norm_attention_D, c.norm_eps), TENSOR, dim=1)
    attention = cached_latent_attention if c.attention == "mla" else cached_grouped_attention
    rotary_on = model.has_rotary(c, number)
    partial_bsD, cache = attention(w.attention, c, h_bsD, positions_bs, cache, rotary_on)
    x_btD += reduce_scatter(partial_bsD, TENSOR, dim=1)
    update_btD, _ = model.feed_forward_branch(w, c, x_btD, jnp.ones(x_btD.shape[:2]))
    return x_btD + update_btD, cache


def cached_layers(w_stack, c: ModelConfig, x_btD, positions_bs, cache, numbers):
    """Stacked layers in order, each with its part of the cache."""

    def step(x_btD, layer):
        w, cache, number = layer
        return cached_layer(w, c, x_btD, positions_bs, cache, number)

    return jax.lax.scan(step, x_btD, (w_stack, cache, numbers))


def extend_shards(w: model.Transformer, cache, tokens_bs, positions_bs, last_b, *, c: ModelConfig):
    """Run new tokens through the model. Returns logits [b, V] after token `last_b` of each row, and the cache."""
    x_btD = vary(model.embed(w, c, tokens_bs), (STAGE,))
    updated = {"prefix": None}
    if w.prefix is not None:
        numbers = jnp.arange(c.dense_prefix)
        x_btD, updated["prefix"] = cached_layers(w.prefix, c, x_btD, positions_bs, cache["prefix"], numbers)

    def block(x_btD, one):
        w, cache, first = one
        updated = {"dense": None, "moe": None}
        if w.dense is not None:
            numbers = first + jnp.arange(len(w.dense.norm_attention_D))
            x_btD, updated["dense"] = cached_layers(w.dense, c, x_btD, positions_bs, cache["dense"], numbers)
        if w.moe is not None:
            number = first + c.layers_per_block - 1
            x_btD, updated["moe"] = cached_layer(w.moe, c, x_btD, positions_bs, cache["moe"], number)
        return x_btD, updated

    first_numbers = c.dense_prefix + c.layers_per_block * jnp.arange(c.n_blocks)
    x_btD, updated["blocks"] = jax.lax.scan(block, x_btD, (w.blocks, cache["blocks"], first_numbers))
    x_bD = jnp.take_along_axis(x_btD, last_b[:, None, None], axis=1)[:, 0]
    x_bD = model.rms_norm(x_bD, w.norm_D, c.norm_eps)
    return (x_bD @ model.unembedding(w, c)).astype(jnp.float32), updated


def extend(c: ModelConfig, mesh) -> Callable:
    """Compile fn(params, cache, tokens_bs, positions_bs, last_b) -> (logits [b, V], cache), once per shape.

    The old cache's memory is reused: do not touch it again. Raises: UserError on a mesh of several devices.
    """
    if mesh.size > 1:
        raise UserError(f"sampling runs on one device so far, and the mesh has {mesh.size}")
    specs = sharding.specs(model.declare(c))
    # Every axis has size 1; the specs name those along which `check_vma` takes the values to vary.
    one = lambda stacked: P(*[STAGE, None][:stacked], BATCH, CONTEXT, TENSOR)
    cache_specs = {"prefix": one(1), "blocks": {"dense": one(2), "moe": one(1)}}
    local = jax.shard_map(
        functools.partial(extend_shards, c=c), mesh=mesh,
        in_specs=(specs, cache_specs, P(BATCH), P(BATCH), P(BATCH)),
        out_specs=(P(BATCH, (CONTEXT, TENSOR, STAGE)), cache_specs))  # fmt: skip
    return jax.jit(local, donate_argnums=1)


# Choosing a token -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One text to continue, and how."""

    prompt: str = ""  # text to continue
    tokens: int = 200  # most tokens to add; fewer if the text ends
    temperature: float = 0.8  # logits are divided by it; 0 takes the likeliest token
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together reach this probability
    seed: int = 0  # same seed, same text

    def __post_init__(self):
        utils.at_least(self, 0, "top_k", "temperature")
        utils.at_least(self, 1, "tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1; 1 keeps every token")


def filtered(logits_bV, temperature_b, top_k_b, top_p_b):
    """Logits over temperature, -inf for tokens that top_k or top_p leave out; the likeliest always stays.

    top_p keeps the likeliest tokens until their probability, after top_k, reaches it (arXiv:1904.09751, section 3.1).
    """
    scaled_bV = logits_bV / jnp.maximum(temperature_b, 1e-6)[:, None]
    order_bV = jnp.argsort(-scaled_bV, axis=-1)
    sorted_bV = jnp.take_along_axis(scaled_bV, order_bV, axis=-1)
    rank_V = jnp.arange(logits_bV.shape[-1])
    limit_b = jnp.where(top_k_b > 0, top_k_b, logits_bV.shape[-1])
    sorted_bV = jnp.where(rank_V[None, :] < limit_b[:, None], sorted_bV, -jnp.inf)
    probability_bV = jax.nn.softmax(sorted_bV, axis=-1)
    before_bV = jnp.cumsum(probability_bV, axis=-1) - probability_bV
    kept_bV = (before_bV < top_p_b[:, None]) & (sorted_bV > -jnp.inf)
    place_bV = jnp.argsort(order_bV, axis=-1)
    return jnp.take_along_axis(jnp.where(kept_bV, sorted_bV, -jnp.inf), place_bV, axis=-1)


@functools.partial(jax.jit, static_argnames="vocabulary")
def choose(logits_bV, temperature_b, top_k_b, top_p_b, seed_b, count_b, *, vocabulary: int):
    """Draw one token a row, by Gumbel noise keyed by the row's seed and how many tokens it has drawn.

    Rows of the table past the tokenizer's vocabulary are never drawn.
    """
    logits_bV = logits_bV[:, :vocabulary]
    noise = lambda seed, count: jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), (vocabulary,))
    drawn_b = jnp.argmax(
        filtered(logits_bV, temperature_b, top_k_b, top_p_b) + jax.vmap(noise)(seed_b, count_b), axis=-1
    )
    return jnp.where(temperature_b > 0, drawn_b, jnp.argmax(logits_bV, axis=-1))


# Requests to texts ----------------------------------------------------------------------------------------------------


def bucket(size: int, most: int) -> int:
    """The next power of two, at most `most`: few shapes, so few compilations."""
    return min(1 << math.ceil(math.log2(max(size, 1))), most)


def prompt_ids(cfg: Config, encoding: tiktoken.Encoding, request: Request) -> list[int]:
    """End of text, then the prompt. Raises: UserError if no token fits behind it."""
    ids = [encoding.eot_token, *encoding.encode_ordinary(request.prompt)]
    T = cfg.data.seq_len
    if len(ids) >= T:
        raise UserError(
            f"a prompt of {len(ids) - 1} tokens and the end of text before it leave no room in data.seq_len={T} "
            f"positions; shorten it to at most {T - 2} tokens"
        )
    return ids


class Sampler:
    """A model ready to continue texts; keeps its compiled functions between calls."""

    def __init__(self, cfg: Config, params, encoding: tiktoken.Encoding):
        self.cfg, self.encoding = cfg, encoding
        self.c = dataclasses.replace(cfg.model, capacity_factor=0.0)
        mesh = sharding.make_mesh("", jax.local_devices()[:1])
        self.params = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
        self.extend = extend(self.c, mesh)

    def ids(self, requests: list[Request]):
        """Yield after every step the token drawn for each request, None where it has ended."""
        prompts = [prompt_ids(self.cfg, self.encoding, request) for request in requests]
        T, n = self.cfg.data.seq_len, len(requests)
        b, s = bucket(n, n * 2), bucket(max(map(len, prompts)), T)
        slots = bucket(max(len(ids) + r.tokens for ids, r in zip(prompts, requests, strict=True)), T)
        padded = requests + [requests[0]] * (b - n)
        settings = [np.array([getattr(r, name) for r in padded]) for name in ("temperature", "top_k", "top_p", "seed")]
        settings = [x.astype(np.float32 if x.dtype.kind == "f" else np.int32) for x in settings]
        room_b = np.array([min(r.tokens, slots - len(ids)) for ids, r in zip(prompts, requests, strict=True)])

        tokens_bs = np.zeros((b, s), np.int32)
        lengths_b = np.ones(b, np.int32)
        for row, ids in enumerate(prompts):
            tokens_bs[row, : len(ids)], lengths_b[row] = ids, len(ids)
        positions_bs = np.broadcast_to(np.arange(s, dtype=np.int32), (b, s))
        # A prompt's padding is written to the cache too; each slot is written again before a token looks at it.
        logits_bV, cache = self.extend(
            self.params, empty_cache(self.c, b, slots), tokens_bs, positions_bs, lengths_b - 1
        )
        running_b = np.ones(n, bool)
        for count in range(int(room_b.max())):
            token_b = choose(logits_bV, *settings, np.full(b, count, np.int32), vocabulary=self.encoding.n_vocab)
            drawn_b = np.asarray(token_b)
            running_b &= (drawn_b[:n] != self.encoding.eot_token) & (count < room_b)
            if not running_b.any():
                return
            yield [int(token) if runs else None for token, runs in zip(drawn_b[:n], running_b, strict=True)]
            positions_b = np.minimum(lengths_b + count, slots - 1)
            logits_bV, cache = self.extend(
                self.params, cache, drawn_b[:, None], positions_b[:, None], np.zeros(b, np.int32)
            )

    def texts(self, requests: list[Request], stream: Callable[[int, str], None] | None = None) -> list[str]:
        """Continue each prompt; returns prompts and continuations. `stream(row, text)` is called as text appears."""
        decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in requests]
        texts = [request.prompt for request in requests]

        def add(row: int, text: str) -> None:
            texts[row] += text
            if stream and text:
                stream(row, text)

        for drawn in self.ids(requests):
            for row, token in enumerate(drawn):
                if token is not None:
                    add(row, decoders[row].decode(self.encoding.decode_single_token_bytes(token)))
        for row, decoder in enumerate(decoders):
            add(row, decoder.decode(b"", final=True))
        return texts


def sample(cfg: Config, params, encoding: tiktoken.Encoding, prompt: str, tokens: int, **settings) -> str:
    """Continue one prompt."""
    return Sampler(cfg, params, encoding).texts([Request(prompt=prompt, tokens=tokens, **settings)])[0]


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """Continue texts with a trained model."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]  # directory of a run, e.g. runs/laptop
    prompt: tuple[str, ...] = ()  # texts to continue, one continuation each
    prompts: str = ""  # file of prompts, or - for standard input: a line is a text, or JSON {"prompt": .., "top_k": ..}
    tokens: int = Request.tokens  # most tokens to add; fewer if the text ends
    temperature: float = Request.temperature  # logits are divided by it; 0 takes the likeliest token
    top_k: int = 50  # only the k likeliest tokens; 0: all
    top_p: float = 0.95  # only the likeliest tokens that together reach this probability
    seed: int = 0  # same seed, same text; the n-th prompt uses seed + n
    json: bool = False  # print one JSON object a text instead


def requests_of(args: Arguments) -> list[Request]:
    """Every prompt with its own settings; what a JSON line does not say, the flags do."""
    lines: list[str | dict] = list(args.prompt)
    if args.prompts:
        name = "standard input" if args.prompts == "-" else args.prompts
        text = sys.stdin.read() if args.prompts == "-" else Path(args.prompts).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            lines.append(_json_request(line, f"{name}:{number}") if line.startswith("{") else line)
    lines = lines or [""]
    shared = {name: getattr(args, name) for name in ("tokens", "temperature", "top_k", "top_p")}
    texts = [line if isinstance(line, dict) else {"prompt": line} for line in lines]
    return [Request(**shared | {"seed": args.seed + n} | text) for n, text in enumerate(texts)]


def _json_request(line: str, place: str) -> dict:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: begins like JSON and is not ({error}): {line[:60]!r}") from error
    known = [field.name for field in dataclasses.fields(Request)]
    if unknown := [name for name in values if name not in known]:
        raise UserError(f"{place}: {unknown[0]!r} is not a setting; {utils.nearest(unknown[0], known)}")
    return values


def load(directory: str) -> Sampler:
    """Open a run's newest checkpoint. Raises: UserError if there is no run, or no checkpoint yet."""
    file = Path(directory) / "config.json"
    if not file.exists():
        raise UserError(f"{directory}: no config.json there; give a run's directory, e.g. runs/laptop")
    about = json.loads(file.read_text())
    cfg = Config.from_dict(about["config"])
    mesh = sharding.make_mesh("", jax.local_devices()[:1])
    params = checkpoint.restore_params(Path(directory) / "checkpoints", sharding.shapes(model.declare(cfg.model), mesh))
    return Sampler(cfg, params, tokenizers.load(about["data"]["tokenizer"]["name"]))


def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python generate.py", use_underscores=True)
    try:
        requests = requests_of(args)
        sampler = load(args.run)
        if args.json:
            for request, text in zip(requests, sampler.texts(requests), strict=True):
                print(json.dumps(dataclasses.asdict(request) | {"text": text}))
        elif len(requests) == 1:
            print(requests[0].prompt, end="", flush=True)
            sampler.texts(requests, stream=lambda _, text: print(text, end="", flush=True))
            print()
        else:
            for n, text in enumerate(sampler.texts(requests)):
                print(f"--- {n}\n{text}")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
