"""What needs another form on each platform, one function outside for each: the experts' product, and attention.

Open `grouped.py`, then `attention.py`: plain JAX and the TPU's kernels. The GPU's are in `grouped_gpu.py` and
`attention_gpu.py`; `blocks.py` is what they share. A kernel gives the numbers of its plain form, to which
tests hold it.

From outside: `grouped.grouped_matmul` and `attention.partial_attention`. Who calls one need not know which form it
took.
"""
