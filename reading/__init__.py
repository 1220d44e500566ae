"""What lies between a step and its tokens: which row comes when, what is in it, and shards that lie in a bucket.

Open `order.py` first: a window is arithmetic of settings and step. `packing.py` puts whole documents into rows, for who
wants them in place of windows. `bucket.py` fetches what a host needs of shards that are not on its disk. What makes
batches of all is `dataset.py`, at the root.

From outside: `order.py`, for `config.py`, `dataset.py`, and what says how a run may change; `bucket.py` and
`packing.py`, for `dataset.py`.
"""
