"""Microbatches through the stages of the mesh: which schedule, checked and drawn, and the program that follows it.

Open `schedules.py` first: a schedule is a table you can print (`python -m pipeline show 1f1b`). Then `ticks.py`, which
follows one, and `step.py`, the one `shard_map` around the model; `check.py` proves a table, `draw.py` prints and draws
it, `fit.py` says how models and batches split over a mesh.

From outside: `pipeline.schedule`, the one that a configuration asks for, and the compiled functions `loss_and_grads`,
`evaluate` and `logits`, which are read from `step.py` (and with it JAX) when they are first named.
"""

COMPILED = ("schedule", "loss_and_grads", "evaluate", "logits")


def __getattr__(name):
    if name not in COMPILED:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    from pipeline import step

    return getattr(step, name)
