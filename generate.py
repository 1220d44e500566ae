"""Sampling. So far every token costs one full forward pass over the window; the KV cache comes with its own issue."""

import numpy as np

import pipeline
import sharding
from utils import Config


def sample(
    cfg: Config, mesh, params, encoding, prompt: str, tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """Continue a prompt by `tokens` tokens, or until end of text; the window is the last data.seq_len tokens.

    Padding rows of the vocabulary, which no text maps to, are never sampled.
    """
    compiled = pipeline.logits(cfg, mesh)
    rng = np.random.default_rng(seed)
    ids = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    for _ in range(tokens):
        window = ids[-cfg.data.seq_len :]
        logits_BTV = compiled(params, sharding.put(_one_row(cfg, window), mesh))
        logits_V = np.asarray(logits_BTV[0, len(window) - 1, : encoding.n_vocab], np.float64) / temperature
        weights_V = np.exp(logits_V - logits_V.max())
        token = int(rng.choice(len(weights_V), p=weights_V / weights_V.sum()))
        if token == encoding.eot_token:
            break
        ids.append(token)
    return encoding.decode(ids[1:])


def _one_row(cfg: Config, window: list[int]) -> dict[str, np.ndarray]:
    """A batch whose rows all hold the window, padded behind: as many rows as the mesh splits sequences into."""
    B, T = cfg.mesh.batch_shards, cfg.data.seq_len
    real_T = np.arange(T) < len(window)
    tokens_T = np.zeros(T, np.int32)
    tokens_T[: len(window)] = window
    rows = lambda x_T, dtype: np.broadcast_to(np.asarray(x_T, dtype), (B, T))
    return {
        "tokens_BT": rows(tokens_T, np.int32),
        "targets_BT": rows(tokens_T, np.int32),
        "positions_BT": rows(np.arange(T), np.int32),
        "segments_BT": rows(real_T, np.int32),
        "weights_BT": rows(real_T, np.float32),
    }
