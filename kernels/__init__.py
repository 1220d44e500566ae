"""The two operations with a separate implementation per platform: the experts' grouped matmul, and attention.

Open `grouped.py` first, then `attention.py`: each has a version in plain JAX and the TPU kernels. The GPU kernels are
in `grouped_gpu.py` and `attention_gpu.py`; `blocks.py` has what all kernels share. Tests check that each kernel
computes the same as plain JAX.

From outside: `grouped.grouped_matmul` and `attention.partial_attention`, which choose the implementation for the
platform.
"""
