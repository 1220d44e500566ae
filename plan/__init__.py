"""Know before you rent: what a configuration needs, sends and takes, read from the program and from the compiler.

Open `planner.py` first: `plan(cfg, topology)` adds up what the others know. `traced_layer.py` reads a layer's matmuls
and collectives from its trace, as formulas; `costs.py` says how often each runs and what it costs on a mesh;
`memory.py` what a device keeps; `hiding.py` what runs beside products; `hardware.py` chips and wires, with sources;
`expected.py` how long a step takes as compiled; `auto.py` chooses what is left to it; `compiled.py` compiles for
absent devices, and `replayed.py` plays what came out against time; `inference.py` is the plan of answers, in place of
training; `show.py` prints and draws. `python -m plan` is the command.

`traced.py` plans any JAX program, also one with other axes: `rows.py` walks its trace, and `program.py` adds it up;
`user_file.py` imports a file that is not ours.
`why.py` puts the traced step beside the plan. `formulas.py` runs all of this in letters, for the planner's page.

From outside: `planner.plan`, `costs.parameters`, `hardware`'s tables, `traced.read`, and `compiled` for who measures.
"""
