"""Sampling with a cache: `python generate.py runs/laptop --prompt "def "`.

A prompt goes through the model once (prefill), then every new token alone (decode): what attention needs of earlier
tokens is kept. Latent attention keeps its latents and rotary keys only; the projections from the latent to keys and
values are absorbed into query and output (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Prefill and decode are one
function, `extend`: s new tokens attend to the S slots of the cache. Mixtures of experts are dropless here, whatever
capacity_factor they were trained with.

It runs on any mesh, parameters where training left them: requests are split over ROWS, heads and vocabulary over
TENSOR as in training, layers and their cache over STAGE, where one stage works after the other.
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
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import model
import sharding
import utils
from config import Config, Count, MeshConfig, MeshFlag, ModelConfig, NotNegative, Size, check
from data import tokenizers
from kernels.scores import attend
from overlap.weights import gathered
from pipeline.step import nothing
from sharding import (
    AXES,
    BATCH,
    CONTEXT,
    STAGE,
    TENSOR,
    all_gather,
    axis_index,
    axis_size,
    psum,
    reduce_scatter,
    shift,
    vary,
)
from train import checkpoint
from utils import UserError
from xla import ordered

ROWS = (*BATCH, CONTEXT)  # neighbours hold different requests: attention to a cache has nothing to ask over CONTEXT
NOWHERE = 2**30  # a position past the last slot of any cache

# The cache ------------------------------------------------------------------------------------------------------------


@struct.dataclass
class LatentCache:
    """What latent attention keeps of each position: C + R numbers, whatever the number of heads."""

    latent_bSC: jax.Array
    rotary_bSR: jax.Array


@struct.dataclass
class GroupedCache:
    """What grouped-query attention keeps of each position: a key and a value for each of the G heads."""

    key_bSgK: jax.Array
    value_bSgK: jax.Array


def cache_specs(c: ModelConfig):
    """How the cache lies on the mesh: key and value heads split over TENSOR; latents the same on its neighbours."""
    heads = (None, TENSOR) if c.attention == "gqa" else ()
    stacked = lambda *layers: P(*layers, ROWS, *heads)
    return {"prefix": stacked(STAGE), "blocks": {"dense": stacked(STAGE, None), "moe": stacked(STAGE)}}


def empty_cache(c: ModelConfig, mesh: Mesh, b: int, slots: int):
    """Zeros for every layer, stacked as the layers are: {"prefix": [P, ..], "dense": [L, J, ..], "moe": [L, ..]}.

    Every stage has a prefix, of which only the first stage's is used.
    """

    def layers(spec, *stacked):
        place = NamedSharding(mesh, spec)
        zeros = lambda *shape: jnp.zeros((*stacked, b, slots, *shape), c.precision.compute, device=place)
        if c.attention == "mla":
            return LatentCache(zeros(c.d_kv_latent), zeros(c.d_rope))
        return GroupedCache(zeros(c.n_kv_heads, c.d_head), zeros(c.n_kv_heads, c.d_head))

    specs, n_dense = cache_specs(c), c.layers_per_block - bool(c.n_experts)
    blocks = {"dense": layers(specs["blocks"]["dense"], c.n_blocks, n_dense) if n_dense else None,
              "moe": layers(specs["blocks"]["moe"], c.n_blocks) if c.n_experts else None}  # fmt: skip
    prefix = layers(specs["prefix"], mesh.shape[STAGE] * c.dense_prefix) if c.dense_prefix else None
    return {"prefix": prefix, "blocks": blocks}


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
    q_bshK, q_bshR = model.latent_queries(w, c, model.query_latent(w, c, x_bsD), positions_bs, rotary_on)
    latent_bsC, rotary_bsR = model.latents(w, c, x_bsD, positions_bs, rotary_on)
    cache = LatentCache(write(cache.latent_bSC, latent_bsC, positions_bs),
                        write(cache.rotary_bSR, rotary_bsR, positions_bs))  # fmt: skip
    q_bshC = jnp.einsum("bshK,ChK->bshC", q_bshK, w.w_key_CHK)
    scale = (c.d_head + c.d_rope) ** -0.5
    q_bshX = jnp.concatenate([q_bshC, q_bshR], axis=-1) * scale
    k_bSX = jnp.concatenate([cache.latent_bSC, cache.rotary_bSR], axis=-1)
    scores_bhsS = jnp.einsum("bshX,bSX->bhsS", q_bshX, k_bSX)
    seen_b1sS = slots_seen(positions_bs, k_bSX.shape[1])[:, None]
    attention_bhsS = jax.nn.softmax(scores_bhsS.astype(jnp.float32), where=seen_b1sS).astype(scores_bhsS.dtype)
    o_bshC = jnp.einsum("bhsS,bSC->bshC", attention_bhsS, cache.latent_bSC)
    o_bshU = jnp.einsum("bshC,ChU->bshU", o_bshC, w.w_value_CHU)
    return jnp.einsum("bshU,hUD->bsD", o_bshU, w.w_out_HUD), cache


def cached_grouped_attention(w: model.GroupedAttention, c: ModelConfig, x_bsD, positions_bs, cache, rotary_on):
    """Attend from new tokens to the cache. Returns a partial sum over TENSOR, and the cache with the new tokens."""
    q_bshK, k_bsgK, v_bsgK = model.queries_keys_values(w, c, x_bsD, positions_bs, rotary_on)
    cache = GroupedCache(write(cache.key_bSgK, k_bsgK, positions_bs), write(cache.value_bSgK, v_bsgK, positions_bs))
    mask_bsS = slots_seen(positions_bs, cache.key_bSgK.shape[1])
    o_bshK = attend(q_bshK, cache.key_bSgK, cache.value_bSgK, mask_bsS)
    return jnp.einsum("bshK,hKD->bsD", o_bshK, w.w_out_HKD), cache


# The model, a few tokens at a time ------------------------------------------------------------------------------------


def cached_layer(w: model.Layer, c: ModelConfig, x_btD, positions_bs, cache, number):
    """One layer, as `model.layer`, attending to the cache. Returns [b, t, D] and the cache with the new tokens."""
    w = gathered(w, c)
    h_btD = model.rms_norm(x_btD, w.norm_attention_D, c.norm_eps)
    h_bsD = all_gather(h_btD, TENSOR, dim=1, to="invarying")  # so that the cached latents are known to be the same
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


def cached_blocks(w_stack: model.Block, c: ModelConfig, x_btD, positions_bs, cache):
    """This stage's blocks in order, as `model.blocks`, each with its part of the cache."""

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

    per_stage = c.n_blocks // axis_size(STAGE)
    number = axis_index(STAGE) * per_stage + jnp.arange(per_stage)
    first_numbers = c.dense_prefix + c.layers_per_block * number
    return jax.lax.scan(block, x_btD, (w_stack, cache, first_numbers))


def extend_shards(w: model.Transformer, cache, tokens_bs, positions_bs, last_b, *, c: ModelConfig):
    """Run new tokens through the model. Returns logits [b, v] after token `last_b` of each row, and the cache.

    Sends over STAGE: the activations, to the next stage at every tick; and the logits, to all.
    """
    stage, stages = axis_index(STAGE), axis_size(STAGE)
    when = lambda mine, run, *args: jax.lax.cond(mine, run, lambda *same: same, *args)

    x_btD = vary(model.embed(*gathered(w, c, "embedding_VD"), tokens_bs), AXES)
    if w.prefix is not None:
        numbers = jnp.arange(c.dense_prefix)
        prefix = lambda x_btD, cache: cached_layers(w.prefix, c, x_btD, positions_bs, cache, numbers)
        x_btD, cache["prefix"] = when(stage == 0, prefix, x_btD, cache["prefix"])

    def tick(carry, at_work):
        blocks = lambda x_btD, cache: cached_blocks(w.blocks, c, x_btD, positions_bs, cache)
        x_btD, cache = when(stage == at_work, blocks, *carry)
        return (shift(x_btD, STAGE), cache), None

    (x_btD, cache["blocks"]), _ = jax.lax.scan(tick, (x_btD, cache["blocks"]), jnp.arange(stages))

    def logits(x_btD):
        x_bsD = model.leave(w, c, x_btD, dim=1)
        x_bD = jnp.take_along_axis(x_bsD, last_b[:, None, None], axis=1)[:, 0]
        return vary((x_bD @ model.unembedding(w, c)).astype(jnp.float32), AXES)

    # The last stage's output was shifted to the first.
    partial_bv = jax.lax.cond(stage == 0, logits, lambda x_btD: nothing(logits, x_btD), x_btD)
    return psum(partial_bv, STAGE), cache


def extend(c: ModelConfig, mesh: Mesh) -> Callable:
    """Compile fn(params, cache, tokens_bs, positions_bs, last_b) -> (logits [b, V], cache), once per shape.

    The old cache's memory is reused: do not touch it again. Raises: UserError if a parameter does not split over the
    mesh.
    """
    sharding.check_divides(model.declare(c), mesh)
    local = jax.shard_map(
        functools.partial(extend_shards, c=c), mesh=mesh,
        in_specs=(sharding.specs(model.declare(c)), cache_specs(c), P(ROWS), P(ROWS), P(ROWS)),
        out_specs=(P(ROWS, TENSOR), cache_specs(c)))  # fmt: skip

    def whole_slices(params, cache, tokens_bs, positions_bs, last_b):
        # Between blocks positions are split over TENSOR. The tokens added here leave nothing in the cache.
        widths = ((0, 0), (0, -tokens_bs.shape[1] % mesh.shape[TENSOR]))
        positions_bs = jnp.pad(positions_bs, widths, constant_values=NOWHERE)
        return local(params, cache, jnp.pad(tokens_bs, widths), positions_bs, last_b)

    return ordered.jit(whole_slices, mesh, donate_argnums=1)


# Choosing a token -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are continued."""

    tokens: Size = 200  # most tokens to add; fewer if the text ends, or reaches data.seq_len
    temperature: NotNegative = 0.8  # logits are divided by it; 0 takes the likeliest token
    top_k: Count = 50  # only the k likeliest tokens; 0: all
    top_p: float = 0.95  # only the likeliest tokens that together reach this probability; 1: all
    seed: int = 0  # same seed, same text; of several prompts, the n-th (from 0) uses seed + n


@dataclass(frozen=True)
class Request(Settings):
    """One text to continue, and how."""

    prompt: str = ""  # text to continue

    def __post_init__(self):
        check(self)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1; 1 keeps every token")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt {self.prompt!r}: not UTF-8 ({error.reason} at character {error.start})") from error


def filtered(logits_bV, temperature_b, top_k_b, top_p_b):
    """Logits over temperature, -inf for tokens that top_k or top_p leave out; the likeliest always stays.

    top_p keeps the likeliest tokens until their probability, after top_k, reaches it (arXiv:1904.09751, section 3.1).
    Of tokens that tie, those with the lower ids count as likelier.
    """
    scaled_bV = logits_bV / jnp.maximum(temperature_b, 1e-6)[:, None]
    order_bV = jnp.argsort(-scaled_bV, axis=-1)
    sorted_bV = jnp.take_along_axis(scaled_bV, order_bV, axis=-1)
    rank_1V = jnp.arange(logits_bV.shape[-1])[None, :]
    sorted_bV = jnp.where((top_k_b[:, None] == 0) | (rank_1V < top_k_b[:, None]), sorted_bV, -jnp.inf)
    probability_bV = jax.nn.softmax(sorted_bV, axis=-1)
    before_bV = jnp.cumsum(probability_bV, axis=-1) - probability_bV
    # Rounding may bring the sum to 1 before the last token, and a tiny top_p to 0: neither may decide.
    kept_bV = (before_bV < top_p_b[:, None]) | (top_p_b[:, None] == 1) | (rank_1V == 0)
    place_bV = jnp.argsort(order_bV, axis=-1)
    return jnp.take_along_axis(jnp.where(kept_bV, sorted_bV, -jnp.inf), place_bV, axis=-1)


@functools.partial(jax.jit, static_argnames="vocabulary")
def choose(logits_bV, temperature_b, top_k_b, top_p_b, seed_b, count_b, *, vocabulary: int):
    """Draw one token a row, by Gumbel noise keyed by the row's seed and how many tokens it has drawn.

    Rows of the table past the tokenizer's vocabulary are never drawn.
    """
    logits_bV = logits_bV[:, :vocabulary]
    noise = lambda seed, count: jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), (vocabulary,))
    noisy_bV = filtered(logits_bV, temperature_b, top_k_b, top_p_b) + jax.vmap(noise)(seed_b, count_b)
    return jnp.argmax(jnp.where(temperature_b[:, None] > 0, noisy_bV, logits_bV), axis=-1)


# Requests to texts ----------------------------------------------------------------------------------------------------


def bucket(size: int, most: int) -> int:
    """The next power of two, at most `most`: few shapes, so few compilations."""
    return min(1 << (size - 1).bit_length(), most)


def prompt_ids(encoding: tiktoken.Encoding, prompt: str, seq_len: int) -> list[int]:
    """End of text, then the prompt. Raises: UserError if no token fits behind it."""
    ids = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    if len(ids) >= seq_len:
        raise UserError(
            f"a prompt of {len(ids) - 1} tokens and the end of text before it leave no room in data.seq_len={seq_len} "
            f"positions; shorten it to at most {seq_len - 2} tokens"
        )
    return ids


class Sampler:
    """A model ready to continue texts; keeps its compiled functions between calls.

    mesh   where params lie; None: one device
    """

    def __init__(self, cfg: Config, params, encoding: tiktoken.Encoding, mesh: Mesh | None = None):
        self.cfg, self.params, self.encoding = cfg, params, encoding
        self.c = dataclasses.replace(cfg.model, capacity_factor=0.0)
        self.mesh = sharding.make_mesh("", jax.local_devices()[:1]) if mesh is None else mesh
        self.extend = extend(self.c, self.mesh)
        everywhere = NamedSharding(self.mesh, P())

        def choose_everywhere(logits_bV, *settings):
            whole_bV = jax.lax.with_sharding_constraint(logits_bV, everywhere)
            return choose(whole_bV, *settings, vocabulary=encoding.n_vocab)

        self.choose = jax.jit(choose_everywhere, out_shardings=everywhere)

    def prompt_ids(self, request: Request) -> list[int]:
        return prompt_ids(self.encoding, request.prompt, self.cfg.data.seq_len)

    def room(self, request: Request) -> int:
        """Most tokens that will be added: what is asked for, as far as prompt and text fit in data.seq_len."""
        return min(request.tokens, self.cfg.data.seq_len - len(self.prompt_ids(request)))

    def ids(self, requests: list[Request]):
        """Yield after every step the token drawn for each request, None where it has ended."""
        prompts, room_b = [self.prompt_ids(r) for r in requests], np.array([self.room(r) for r in requests])
        T, n, V = self.cfg.data.seq_len, len(requests), self.encoding.n_vocab
        b, s = bucket(n, 2 * n), bucket(max(map(len, prompts)), T)
        b += -b % math.prod(self.mesh.shape[axis] for axis in ROWS)
        slots = bucket(max(len(ids) + room for ids, room in zip(prompts, room_b.tolist(), strict=True)), T)
        rows = requests + [requests[0]] * (b - n)
        settings = (np.float32([r.temperature for r in rows]), np.int32([min(r.top_k, V) for r in rows]),
                    np.float32([r.top_p for r in rows]), np.uint32([r.seed % 2**32 for r in rows]))  # fmt: skip

        tokens_bs, lengths_b = np.zeros((b, s), np.int32), np.ones(b, np.int32)
        for row, ids in enumerate(prompts):
            tokens_bs[row, : len(ids)], lengths_b[row] = ids, len(ids)
        # A prompt's padding is written to the cache too; each slot is written again before a token looks at it.
        positions_bs, last_b = np.tile(np.arange(s, dtype=np.int32), (b, 1)), lengths_b - 1
        cache, running_n = empty_cache(self.c, self.mesh, b, slots), np.ones(n, bool)
        for count in range(room_b.max()):
            logits_bV, cache = self.extend(self.params, cache, tokens_bs, positions_bs, last_b)
            drawn_b = np.asarray(self.choose(logits_bV, *settings, np.full(b, count, np.int32)))
            running_n &= drawn_b[:n] != self.encoding.eot_token
            yield [int(token) if runs else None for token, runs in zip(drawn_b[:n], running_n, strict=True)]
            running_n &= count + 1 < room_b
            if not running_n.any():
                return
            tokens_bs, positions_bs, last_b = drawn_b[:, None], (lengths_b + count)[:, None], np.zeros(b, np.int32)

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


def sample(cfg: Config, params, encoding: tiktoken.Encoding, mesh: Mesh, prompt: str, tokens: int, **settings) -> str:
    """Continue one prompt."""
    return Sampler(cfg, params, encoding, mesh).texts([Request(prompt=prompt, tokens=tokens, **settings)])[0]


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments(Settings):
    """Continue texts with a trained model."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]  # directory of a run, e.g. runs/laptop
    prompt: tuple[str, ...] = ()  # texts to continue, one continuation each
    prompts: str = ""  # file of prompts, or - for standard input: a line is a text, or JSON {"prompt": .., "top_k": ..}
    json: bool = False  # print one JSON object a text instead
    mesh: MeshFlag = dataclasses.field(default_factory=MeshConfig)  # devices along each mesh axis
    devices: Count = 0  # simulate this many CPU devices; 0: work on those there are


def requests_of(args: Arguments) -> list[Request]:
    """Every prompt with its own settings; what a JSON line does not say, the flags do. None at all: an empty prompt."""
    asked = [{"prompt": text} for text in args.prompt] + (read_prompts(args.prompts) if args.prompts else [])
    shared = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    return [Request(**shared | {"seed": args.seed + n} | own) for n, own in enumerate(asked or [{}])]


def read_prompts(name: str) -> list[dict]:
    """Read settings of one request from each line that is not empty. Raises: UserError naming the line."""
    place = "standard input" if name == "-" else name
    lines = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).replace(b"\r\n", b"\n").split(b"\n")
    asked = [_settings(line, f"{place}:{number}") for number, line in enumerate(lines, 1) if line]
    if not asked:
        raise UserError(f'{place}: no prompt in it; a line is a text, or JSON {{"prompt": "..", "top_k": 5}}')
    return asked


def _settings(line: bytes, place: str) -> dict:
    try:
        values = json.loads(line) if line.startswith(b"{") else {"prompt": line.decode()}
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}): {line[:60]!r}") from error
    except ValueError as error:
        raise UserError(
            f'{place}: begins like JSON and is not ({error}): {line.decode()[:60]!r}; a text goes in {{"prompt": ".."}}'
        ) from error
    fields = [field.name for field in dataclasses.fields(Request)]
    for setting in values:
        if setting not in fields:
            raise UserError(f"{place}: {setting!r} is not a setting; {utils.nearest(setting, fields)}")
    try:
        Request(**values)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return values


def load(directory: str, mesh: MeshConfig | str = "") -> Sampler:
    """Open a run's newest checkpoint. Raises: UserError if there is no run, no checkpoint yet, or no such mesh."""
    file = Path(directory) / "config.json"
    if not file.exists():
        raise UserError(f"{directory}: no config.json there; give a run's directory, e.g. runs/laptop")
    try:
        about = json.loads(file.read_text())
        config, tokens = about["config"], about["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not the config.json of a training run ({error!r})") from error
    if tokens is None:
        raise UserError(
            f"{directory} holds converted weights, which name no tokenizer; begin a run from them with "
            f"python main.py --init-from {directory}, and sample that"
        )
    cfg, devices = Config.from_dict(config), sharding.make_mesh(mesh)
    declarations = model.declare(cfg.model)
    sharding.check_divides(declarations, devices)
    params = checkpoint.restore_params(Path(directory) / "checkpoints", sharding.shapes(declarations, devices))
    encoding = tokenizers.of(tokens) or tokenizers.load(tokenizers.UNKNOWN)  # which says why there is none
    return Sampler(cfg, params, encoding, devices)


def show(sampler: Sampler, requests: list[Request], as_json: bool) -> None:
    """Print every text: a single one while it grows."""
    for n, request in enumerate(requests):
        if (room := sampler.room(request)) < request.tokens:
            why = f"of {request.tokens} tokens fit behind its prompt in data.seq_len={sampler.cfg.data.seq_len}"
            print(f"note: text {n} ends after {room} tokens at most: no more {why}", file=sys.stderr)
    if as_json:
        for request, text in zip(requests, sampler.texts(requests), strict=True):
            print(json.dumps(dataclasses.asdict(request) | {"text": text}))
    elif len(requests) == 1:
        print(requests[0].prompt, end="", flush=True)
        sampler.texts(requests, stream=lambda _, text: print(text, end="", flush=True))
        print()
    else:
        for n, text in enumerate(sampler.texts(requests)):
            print(f"--- {n}\n{text}")


HELP = """\
e.g. python generate.py runs/laptop --prompt 'def '
     python generate.py runs/laptop --prompts FILE --json

Continue texts with a trained model."""


@utils.exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python generate.py", description=HELP, use_underscores=True)
    check(args)
    requests = requests_of(args)
    utils.use_devices(args.devices)
    show(load(args.run, args.mesh), requests, args.json)


if __name__ == "__main__":
    sys.exit(main())
