"""The parts of `dataset.py`, at the root, which reads token shards as batches.

Open `order.py` first: it defines the order of rows. `manifests.py` checks the manifest of shards, `bucket.py` downloads
the parts of remote shards that a host needs, and `packing.py` packs whole documents into rows. `objectives.py` divides
a text into inputs and targets, `examples.py` makes the examples of a row, and `features.py` makes batches of them.

From outside: `dataset.py` uses all of them, and `data/` and `train/` some.
"""
