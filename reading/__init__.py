"""What lies between a step and its tokens: which window comes when, and shards that lie in a bucket.

Open `order.py` first: a window is arithmetic of settings and step. `bucket.py` fetches what a host needs of shards that
are not on its disk. What makes batches of both is `dataset.py`, at the root.

From outside: `order.py`, for `config.py`, `dataset.py`, and what says how a run may change; `bucket.py`, for
`dataset.py`.
"""
