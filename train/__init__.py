"""Everything around the training step: run directories, checkpoints, interruptions, several hosts and monitoring.

Open `directory.py` first: it lists the files of a run and controls who may write them; `storage.py` also stores them in
a bucket. `preflight.py` checks a run before it starts, and `start.py` builds or restores its state. `checkpoint.py`
saves and restores, and `steps.py` verifies what was saved. `progress.py` evaluates and shows progress, and
`interruptions.py` stops a run early without losing work. `processes.py` joins the processes of several hosts:
`board.py` carries their messages, `agreement.py` starts and stops them at the same step, `watchdog.py` ends them all if
one is lost or hangs, and `pace.py` finds a slow host. `guard.py` reports steps whose loss or gradient is not finite,
`tracking.py` sends metrics to wandb, `report.py` plots them, and `selfcheck.py` tests the hosts. `recorder.py`
records steps with JAX's profiler, and `profile.py` compares them with the plan. Four modules are also commands:
`python -m train.checkpoint`, `train.report`, `train.selfcheck` and `train.profile`.

From outside: `main.py` uses all modules; `generate/`, `weights/` and other packages read a run with `checkpoint`.
"""
