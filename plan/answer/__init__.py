"""Answer questions about a step: which settings and mesh, why so slow, for how many dollars.

Open `planning.py` first: it plans or compiles a step, suggests faster settings, and searches all meshes. `auto.py`
chooses the settings that are `auto`. `show.py` prints and draws a plan. `explain.py` says what a step loses time to,
and `why.py` compares the plan with the traced step. `budget.py` computes days and dollars, and `front.py` compares
topologies. `own_steps.py` fits a plan to steps that you measured. `inference.py` plans inference, `at_scale.py` adds
what our engine doesn't do, and `serving.py` finds the cheapest layout. `parameter_list.py` lists every parameter.

From outside: `parameter_list`, and what `plan/planner.py` imports from here.
"""
