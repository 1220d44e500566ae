"""Words out: texts continued by a trained model, on any mesh.

Open `engine.py` first: requests that share a batch. `cache.py` is the model a few tokens at a time, `sampling.py` how a
token is chosen, `beam.py` how the likeliest text is searched, `speculative.py` how a small model hurries a large one,
`quantised.py` how weights and cache become int8; `runs.py` opens the folder of a run; `texts.py` is what most want:
texts in, texts out. A command too: `python -m generate`.

From outside: `load`, `sample`, `Sampler` and `Request`, which are read from `texts.py` (and with it JAX) when they are
first named; `runs.open_run`; `engine` and `texts` by `serve/` and `evaluate/`; `cache` by who looks at it.
"""

NAMES = ("load", "sample", "prompt_ids", "Sampler", "Request")


def __getattr__(name):
    if name not in NAMES:
        raise AttributeError(f"module 'generate' has no attribute {name!r}")
    from generate import texts

    return getattr(texts, name)
