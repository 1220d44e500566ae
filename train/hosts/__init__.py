"""The processes of a run, one on each host: how they start and stop together, and how a lost or slow host is found.

Open `processes.py` first: it joins the processes, and ends them together. `board.py` carries their messages,
`agreement.py` starts and stops them at the same step, `watchdog.py` ends them all if one is lost or hangs, and
`pace.py` finds a slow host.

From outside: `join`, `Processes` and `end_together` of `processes`, and `Board`.
"""
