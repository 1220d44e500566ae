"""Text generation with a trained model, on any mesh.

Open `engine.py` first: it batches requests continuously. `cache.py` runs the model on a few new tokens with a KV cache,
`request.py` has the settings of a request, `sampling.py` samples tokens, `beam.py` is beam search, `speculative.py` is
speculative decoding with a draft model, `quantised.py` quantizes weights and cache to int8, and `runs.py` opens the
directory of a run. `texts.py` is the interface for most uses: prompts in, texts out. The command is `python -m
generate`.

From outside: `load`, `sample`, `Sampler` and `Request`, which are imported from `texts.py` (and JAX with it) on first
use; `runs.open_run`; `engine`, `texts` and `request`, for `serve/` and `evaluate/`; `cache`, to inspect it.
"""

NAMES = ("load", "sample", "prompt_ids", "with_sentinels", "Sampler", "Request")


def __getattr__(name):
    if name not in NAMES:
        raise AttributeError(f"module 'generate' has no attribute {name!r}")
    from generate import texts

    return getattr(texts, name)
