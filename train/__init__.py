"""Everything around the training step: run directories, checkpoints, interruptions and monitoring; several hosts have
the package `train/hosts/`.

Open `directory.py` first: it lists the files of a run and controls who may write them; `storage.py` also stores them in
a bucket. `checkpoint.py` saves and restores, and `steps.py` verifies what was saved. `progress.py` evaluates and shows
progress, and `interruptions.py` stops a run early without losing work. `guard.py` reports steps whose loss or gradient
is not finite, `tracking.py` sends metrics to wandb, `report.py` plots them, and `selfcheck.py` tests the hosts.
`recorder.py` records steps with JAX's profiler. Three modules are also commands: `python -m train.checkpoint`,
`train.report` and `train.selfcheck`.

From outside: `main.py` and `startup/` use all modules; `generate/`, `weights/` and other packages read a run with
`checkpoint`.
"""
