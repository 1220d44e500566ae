"""A run's life: where it is kept, what is saved and when, what interrupts it, who watches.

Open `directory.py` first: what lies in a run's directory, and who may write there; `storage.py` has it in a bucket too.
`start.py` says what a run starts from, `checkpoint.py` what is saved of it, and how it goes on from there, `steps.py`
whether what was saved is good; `progress.py` measures how far it is.
`interruptions.py` ends it early, with nothing lost. `processes.py` joins the processes of several hosts: `board.py`
carries their messages, `agreement.py` begins and stops them at the same step, `watchdog.py` ends them if one is lost or
hangs, and `pace.py` names a slow one. `guard.py` watches for steps that are not finite; `tracking.py` tells wandb;
`report.py` draws; `selfcheck.py` looks at the hosts. `preflight.py` is what is known of a run before it starts. Three
are commands too: `python -m train.checkpoint`, `train.report` and `train.selfcheck`.

From outside: all of them by `main.py`; `checkpoint` by who reads a run, as `generate/` and `weights/` do.
"""
