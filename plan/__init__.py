"""Predict memory, communication and step time before you pay for accelerators. The command is `python -m plan`.

Open `planner.py` first: `plan(cfg, topology)` combines the other modules. `traced_layer.py` reads the matmuls and
collectives of a layer from its trace, as formulas. `costs.py` counts how often each runs, and its cost on a mesh.
`weights.py` has the shards of parameters, and `networks.py` adds up bytes by axis and by network. `memory.py` predicts
memory, `offload.py` what the host stores, `hiding.py` which communication overlaps with compute, `expected.py` the time
of a compiled step, and `measured.py` the time of a real one, with constants from published steps or from your own run
(`constants.py`). `hardware.py` lists chips and links with sources, and `tiers.py` splits bytes between NVLink and
InfiniBand. `auto.py` chooses the settings that are `auto`.
`compiled.py` compiles for devices that are not attached, and `replayed.py` simulates the compiled program.
`inference.py` plans inference, and `serving.py` finds its cheapest layout. `show.py` prints and draws. `why.py`
compares the plan with the traced step. `explain.py` says what a step loses time to, `budget.py` computes days and
dollars, and `front.py` compares topologies.

`traced.py` plans any JAX program, with any mesh axes: `rows.py` walks its trace and lists the operations, `program.py`
adds up their costs, and `user_file.py` imports the user's file.

From outside: `planner.plan`, `costs.parameters`, the tables of `hardware`, `traced.read`, and `compiled`.
"""
