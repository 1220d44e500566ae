"""When the model communicates: all at once, in chunks, around a ring or ahead of use; and which activations it saves.

Open `positions.py` first: its three functions exchange positions between TENSOR neighbors, each in two forms.
`rings.py` implements the rings. `context.py` gives attention the keys and values of CONTEXT neighbors, `weights.py`
gathers weight shards, `remat.py` chooses what a layer saves, `layers.py` scans or unrolls the layers. The forms differ
only by rounding, and no code outside this package asks which form was chosen.

From outside: these three functions; `over_context`; `at_use`, `held_by_step` and the like; `remat`; `scan_layers`.
"""
