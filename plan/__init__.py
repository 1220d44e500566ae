"""Predict memory, communication and step time before you pay for accelerators. The command is `python -m plan`.

Open `planner.py` first: it lists the public names, such as `plan(cfg, topology)`. Each package here answers
one question: `chips/` what devices can do, `trace/` what a program contains, `count/` what a step does, `simulate/` how
long a compiled program takes, `time/` how long a step takes, and `answer/` what follows from that. A package imports
only from those before it.

`verify.py` compiles the first layouts of a search, and `without_jax.py` lets the command answer without the second
that importing JAX takes. Three more commands are here. `traced.py` plans any JAX program, with any mesh axes.
`replay.py` simulates any TPU program's text, and `profile.py` compares the profile that a run recorded with its plan.

From outside: `planner.plan`, and what each package lists.
"""
