"""Count what one device does in a training step: FLOPs, bytes sent and memory, by formulas.

Open `costs.py` first: it counts how often each matmul and collective of a layer runs, and its cost on a mesh.
`traced_layer.py` reads them from the layer's trace, as formulas. `weights.py` has the shards of parameters,
`networks.py` adds up bytes by axis and by network, `matrices.py` counts Muon's updates, `memory.py` predicts memory,
and `step.py` has all counts of a step, in `Step`.

From outside: `costs.parameters`, `memory.MEANS`, and `step.is_tpu`.
"""
