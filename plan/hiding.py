"""What of a step's wires stands beside products, in the schedule that the TPU compiler makes of it, and what it sends.

Rules, found by reading compiled schedules with the default options of `xla/options.py` on v4; tests/plan/test_tpu.py
holds them to the compiler, within 10% of all bytes. Elsewhere nothing is known to be hidden.
"""

import math

from config import ModelConfig
from sharding import CONTEXT, EXPERT, FSDP, TENSOR


def made_of(kind: str, axes: tuple[str, ...], mesh: dict[str, int], platform: str) -> str:
    """The collective that is compiled: over all chips of a slice, if more than 4, a reduce-scatter is an all-reduce."""
    split = {axis: n for axis, n in mesh.items() if n > 1}
    everywhere = set(axes) == set(split) and math.prod(split.values()) > 4
    return "all-reduce" if platform == "tpu" and kind == "reduce-scatter" and everywhere else kind


def exposed(c: ModelConfig, mesh: dict[str, int], platform: str, kind: str, axes, when: str, of: str) -> float:
    """The share of a collective's bytes that products do not stand beside.

    when  forward, again (the backward pass repeats it) or back
    of    "" outside of the loops over layers; else what a layer needs it for
    """
    if platform != "tpu" or not of or kind in ("reduce-scatter", "all-reduce", "all-to-all"):
        return 1
    n = mesh[TENSOR]
    if axes == (TENSOR,):
        if kind == "collective-permute":
            return n // 2 / (n - 1) if (when, of) == ("forward", "feed-forward") else 0
        return float(when != "back")
    return 1
