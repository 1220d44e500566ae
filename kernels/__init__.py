"""What needs another form on each platform, one function outside for each: the experts' product, and attention.

Open `grouped.py`, then `attention.py`: plain JAX and the TPU's kernels. The GPU's are in `grouped_gpu.py` and
`attention_gpu.py`; `blocks.py` is what they share. `scores.py` is attention by all scores at once. A kernel gives the
numbers of its plain form, which the tests hold it to.

From outside: `grouped.grouped_matmul`, `attention.partial_attention` and `scores.attend`. Who calls one need not know
which form it took.
"""
