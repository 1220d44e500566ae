"""Layers in order: scanned, so that compile time does not grow with depth; or each traced by itself, as decoding wants.

A scan copies each layer's arrays out of the stack, which for one token takes longer than the matmuls.
"""

import jax
import jax.numpy as jnp


def scan_layers(one, stack, x, number_of):
    """Apply one(w, x, number) -> (x, more) to each layer, or block. Returns x, and every `more`, stacked or in a list.

    stack      stacked arrays, over which `one` is scanned; or a list, for each entry of which `one` is traced
    number_of  fn(i) -> the number of the i-th
    """
    if not isinstance(stack, list):
        step = lambda x, w_and_number: one(w_and_number[0], x, w_and_number[1])
        return jax.lax.scan(step, x, (stack, number_of(jnp.arange(stack_size(stack)))))
    returned = []
    for i, w in enumerate(stack):
        x, more = one(w, x, number_of(i))
        returned.append(more)
    return x, returned


def stack_size(stack) -> int:
    return len(stack) if isinstance(stack, list) else len(jax.tree.leaves(stack)[0])
