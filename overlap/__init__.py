"""When the exchanges of the model happen: all at once, in parts, in a ring, ahead; and what is kept meanwhile.

Open `positions.py` first: the three verbs by which the model says what TENSOR neighbours exchange, each in two forms.
`rings.py` has the rings of one form. `context.py` passes keys around CONTEXT, `weights.py` says when slices of weights
are joined, `remat.py` what a layer keeps, and `layers.py` scans layers or unrolls them. No number changes but by
rounding, and nothing outside of this room asks which form was chosen.

From outside: the verbs; `over_context`; `at_use`, `held_by_step` and their kin; `remat`; `scan_layers`.
"""
