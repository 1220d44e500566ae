"""Pipeline parallelism: schedules for microbatches, and the compiled training step that runs them on a mesh.

Open `schedules.py` first: a schedule is a table you can print (`python -m pipeline show 1f1b`). `ticks.py` runs it on
the devices, and `step.py` wraps the model in the one `shard_map`. `check.py` verifies a table, `draw.py` prints and
draws it, `fit.py` checks whether models and batches split over a mesh, and `documents.py` deals packed documents over
`context`.

From outside: `pipeline.schedule`, which builds the schedule of a config, and `loss_and_grads`, `evaluate` and `logits`,
which return compiled functions. Their first use imports `step.py`, and with it JAX.
"""

COMPILED = ("schedule", "loss_and_grads", "evaluate", "logits")


def __getattr__(name):
    if name not in COMPILED:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    from pipeline import step

    return getattr(step, name)
