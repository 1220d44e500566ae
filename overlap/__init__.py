"""When the model communicates: all at once, in chunks, around a ring or ahead of use; and which activations it saves.

Open `positions.py` first: its three functions all-gather and reduce-scatter positions over TENSOR, each in two forms.
`rings.py` implements the rings. `context.py` computes attention over keys and values that are sharded over CONTEXT.
`experts.py` sends tokens to their experts over EXPERT. `weights.py` gathers weight shards, and `gradients.py`
reduce-scatters their gradients. `remat.py` chooses what a layer saves, `fusion.py` stores gated units, and `layers.py`
scans or unrolls the layers.
Results of different forms differ only by rounding, and code outside this package does not depend on the chosen form.
Shape suffixes such as _bsD are explained in the legend of `model.py`.

From outside: these three functions; `over_context`; `apply_experts`; `at_use`, `held_by_step` and the like; `remat`;
`scan_layers`.
"""
