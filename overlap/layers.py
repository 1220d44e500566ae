"""Apply layers in order: in a scan, so that compile time does not grow with depth, or unrolled, as in decoding.

A scan copies each layer's arrays out of the stack. For a single token that takes longer than the matmuls.
"""

import jax
import jax.numpy as jnp


def scan_layers(one, stack, x, number_of):
    """Apply one(w, x, number) -> (x, more) to each layer or block. Return x, and all `more`, stacked or as a list.

    stack      weights: stacked arrays, which are scanned, or a list, which is unrolled: `one` is traced for each entry
    number_of  fn(i) -> the number of the i-th layer or block
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
