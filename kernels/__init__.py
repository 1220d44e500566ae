"""The two operations with a separate implementation per platform: the experts' grouped matmul, and attention.

Open `grouped.py` first, then `attention.py`, and `masked.py` for attention with any mask: each has a version in plain
JAX and the TPU kernels. The GPU kernels are in `grouped_gpu.py` and `attention_gpu.py`; `blocks.py` has what all
kernels share. Tests check that each kernel computes the same as plain JAX.

From outside: `grouped.grouped_matmul`, `attention.partial_attention` and `masked.masked_attention`, which choose the
implementation for the platform.
"""
