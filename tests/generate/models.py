"""Models for the tests of generation: some with random weights, and one trained on a simple rule."""

import dataclasses
import json

import jax
import numpy as np

import model
import optimizer
import sharding
from config import Config, ModelConfig, preset, replace
from data import tokenizers
from tests import helpers
from train import checkpoint

BYTES = tokenizers.load("bytes")
EOT, V = BYTES.eot_token, BYTES.n_vocab


def one_device():
    return sharding.make_mesh("", jax.local_devices()[:1])


GROUPED = helpers.in_model(helpers.GROUPED)
# Query latents, MoE with bias and shared experts, dense prefix; the dense layers of blocks have no rotary.
TINY = preset("tiny", **{"model.no_rope_every": 2})
CONFIGS = {
    "tiny": TINY,
    "mla without query latent, dense, tied": replace(
        TINY, **{"model.d_query_latent": 0, "model.n_experts": 0, "model.n_layers": 2, "model.dense_prefix": 0,
                 "model.no_rope_every": 0, "model.tie_embeddings": True}),
    "gqa, softmax router, no bias, none shared": replace(
        TINY, **GROUPED, **{
            "model.router": "softmax", "model.balance_rate": 0.0, "model.n_shared": 0, "model.n_layers": 3,
            "model.moe_every": 1, "model.no_rope_every": 2, "model.activation": "gelu"}),
    "gqa in parallel, LayerNorm, biases, half rotary": replace(
        TINY, **GROUPED, **{
            "model.n_experts": 0, "model.n_layers": 3, "model.norm": "layer", "model.parallel_residual": True,
            "model.bias": "feed_forward,logits,attention", "model.rope_dims": 4}),
    # Layer 2 attends to all positions: on two stages, one of the first stage, but none of the second.
    "gqa, windows and sinks": replace(
        TINY, **GROUPED, **{
            "model.n_experts": 0, "model.window": "5:3:30", "model.softmax": "sinks", "model.norm": "sandwich"}),
    # gpt-oss's parts, with dense layers and shared experts.
    "gqa, biases of experts, clamped": replace(
        TINY, **GROUPED, **{"model.bias": "attention,experts", "model.activation": "swiglu_clamped",
                            "model.rope_scaling": "yarn_exact:4:1:32:4096", "model.softmax": "sinks"}),
    "mla, windows, caps": replace(TINY, **{"model.window": "5", "model.softmax": "cap:0.7:0.8"}),
    "gqa, caps": replace(TINY, **GROUPED, **{"model.n_experts": 0, "model.softmax": "cap:0.7:0.8"}),
}  # fmt: skip


def placed(cfg: Config, mesh):
    """Return random parameters, the same on any mesh."""
    declarations = model.declare(cfg.model)
    place = lambda x, shape: jax.device_put(x, shape.sharding)
    return jax.tree.map(place, helpers.draw(declarations, seed=1), sharding.shapes(declarations, mesh))


RULE = Config(
    model=ModelConfig(vocab_size=272, d_model=48, n_layers=1, n_heads=2, attention="gqa", n_kv_heads=1, d_head=12,
                      d_ff=64, precision=TINY.model.precision),
    data=dataclasses.replace(TINY.data, seq_len=24, batch_size=16),
    optim=dataclasses.replace(TINY.optim, lr=2e-2, warmup_steps=10),
    run=dataclasses.replace(TINY.run, steps=200),
)  # fmt: skip


def follow(byte):
    """Return the next byte of the rule: plus three, modulo the 90 characters from ! to z."""
    return 33 + (byte - 33 + 3) % 90


def rule_text(prompt: str, tokens: int) -> str:
    for _ in range(tokens):
        prompt += chr(follow(ord(prompt[-1])))
    return prompt


def save_run(directory):
    """Write the files of a finished run that generation reads, with the trained model."""
    with checkpoint.Saver(directory / "checkpoints") as manager:
        checkpoint.save(manager, 200, trained(), {})
    about = {"config": RULE.to_dict(), "data": {"tokenizer": {"name": "bytes"}}}
    (directory / "config.json").write_text(json.dumps(about))
    return directory


def trained():
    """Train a one-layer model until it follows the rule, and return its state."""
    mesh, rng = one_device(), np.random.default_rng(0)
    B, T = RULE.data.batch_size, RULE.data.seq_len
    step, state = optimizer.train_step(RULE, mesh), optimizer.init(RULE, mesh)
    batch = {"positions_BT": np.tile(np.arange(T, dtype=np.int32), (B, 1)), "segments_BT": np.ones((B, T), np.int32)}
    for _ in range(RULE.run.steps):
        rows_BT = [np.full(B, EOT), rng.integers(33, 123, B)]
        while len(rows_BT) <= T:
            rows_BT.append(follow(rows_BT[-1]))
        rows_BT = np.stack(rows_BT, axis=1).astype(np.int32)
        weights_BT = (rows_BT[:, :-1] != EOT).astype(np.float32)  # the token after end of text is random
        batch |= {"tokens_BT": rows_BT[:, :-1], "targets_BT": rows_BT[:, 1:], "weights_BT": weights_BT}
        state, metrics = step(state, sharding.put(batch, mesh))
    assert metrics["loss"] < 0.02
    return state
