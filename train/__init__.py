"""A run's life: where it is kept, what is saved and when, what interrupts it, who watches.

Open `checkpoint.py` first: what is saved of a run, and how it goes on from there. `guard.py` watches for steps that are
not finite; `tracking.py` tells wandb; `report.py` draws. Two are commands too: `python -m train.checkpoint` and
`python -m train.report`.

From outside: all of them by `main.py`; `checkpoint` by who reads a run, as `generate.py` and `weights/` do.
"""
