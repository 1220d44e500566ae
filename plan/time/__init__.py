"""Predict how long a step takes, from its counts.

Open `plan.py` first: a `Plan` is a `Step` with its times. `roofline.py` gives a lower bound, `simulated.py` the time of
the simulated compiled step, and `measured.py` the best estimate: it multiplies the costs of `terms.py` by constants
that `fit.py` fits to published steps. `offload.py` adds copies to the host, and `tiers.py` splits bytes between NVLink
and InfiniBand.

From outside: `plan.Plan`, which `planner.plan` returns.
"""
