"""Choose the architecture of a model: a decoder (`model.py`), or an encoder and a decoder (`encoder_decoder.py`)."""

import jax

import encoder_decoder
import model
import sharding
from config import Config, ModelConfig


def architecture(c: ModelConfig):
    """Return the module that has the model's `declare`, `embed_batch` and `stage`."""
    return encoder_decoder if c.encoder_layers else model


def declare(c: ModelConfig) -> model.Transformer:
    """Declare every parameter, as `model.declare` and `encoder_decoder.declare`."""
    return architecture(c).declare(c)


def as_stored(d: sharding.Declaration, cfg: Config) -> sharding.Declaration:
    """Declare a parameter as it is stored between steps: with `optim.shard_over_data`, sharded over its replicas too.

    Its moments and its update are sharded in the same way (ZeRO stage 1, arXiv:1910.02054). Norms and biases, which
    start at a constant (std 0), stay replicated: they are too small to be worth two collectives each.
    """
    wanted = cfg.optim.shard_over_data and cfg.mesh.data > 1 and d.std
    return sharding.shard_over_replicas(d, cfg.mesh.sizes) if wanted else d


def declare_stored(cfg: Config) -> model.Transformer:
    """Declare every parameter `as_stored`."""
    return jax.tree.map(lambda d: as_stored(d, cfg), declare(cfg.model))


def gather_replicas(params, cfg: Config):
    """All-gather the parameters that `declare_stored` shards over their replicas, once per step; no other changes.

    Sends over the replicas' axes: (n - 1)/n of each. Backward: a reduce-scatter of its gradient, the same bytes. The
    all-reduce that it replaces sends both.
    """

    def gather(d, stored, x):
        dims = [dim for dim, (here, there) in enumerate(zip(d.spec, stored.spec, strict=True)) if here != there]
        return sharding.all_gather(x, sharding.replicas(d), dim=dims[0]) if dims else x

    return jax.tree.map(gather, declare(cfg.model), declare_stored(cfg), params)


def passes(c: ModelConfig) -> int:
    """Return how often a microbatch passes through the pipeline stages: twice if there is an encoder."""
    return 2 if c.encoder_layers else 1
