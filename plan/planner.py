"""The public names of the planner. `plan(cfg, topology)` returns a `Plan`; `answer/planning.py` has all of them."""

from plan.answer.planning import compile_plan, faster, faster_layout, largest_batch, meshes, plan, search
from plan.time.plan import Plan

__all__ = ["Plan", "compile_plan", "faster", "faster_layout", "largest_batch", "meshes", "plan", "search"]
