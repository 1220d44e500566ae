"""Which host is slow: all wait for the slowest at every step, so that the time of a step does not say.

Each process times products that its first device does alone, while the devices have nothing else to do. A chip or a
core that is throttled is seen; one that others use at times is not, for the shortest of many tries counts.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

SLOW = 1.5  # times the median
SHARE = 1000  # of the time, one part is spent on measuring
# On a CPU a try is shorter than a turn of its scheduler: of two processes on 2 cores with four more that compute, the
# shortest of 40 varied by 8% in 12 measurements, where that of 5, ten times as long, trebled.
TRIES = 40


class Pace:
    """When this process measures, so that it costs next to nothing."""

    def __init__(self):
        self.due = -math.inf

    def measure(self) -> float | None:
        """Milliseconds of the products; None: it is too early, or there is no room for them."""
        if time.monotonic() < self.due:
            return None
        try:
            work = products()
        except jax.errors.JaxRuntimeError:  # a device that is full
            self.due = math.inf
            return None
        times_s = [timed(work) for _ in range(TRIES)]
        self.due = time.monotonic() + SHARE * sum(times_s)
        return 1000 * min(times_s)


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@functools.cache
def products() -> Callable[[], None]:
    """A function that waits for products of matrices on the first device: 0.34 TFLOP, on a CPU 42 MFLOP; about 1 ms."""
    device = jax.local_devices()[0]
    size, count, dtype = (128, 10, jnp.float32) if device.platform == "cpu" else (2048, 20, jnp.bfloat16)
    x_NN = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)  # whose powers are all the same
    power = jax.jit(lambda x_NN: jax.lax.fori_loop(0, count, lambda _, y_NN: y_NN @ x_NN, x_NN)).lower(x_NN).compile()
    jax.block_until_ready(power(x_NN))  # the first time takes longer
    return lambda: jax.block_until_ready(power(x_NN))


def slowest(times_ms: dict[int, list[float]]) -> tuple[int, float, float] | None:
    """The process that is slow, its time, and the median's; None: none is, or not each has been timed twice.

    Of two measurements the shorter counts: a machine that is busy for a while is not slow.
    """
    if len(times_ms) < 2 or min(map(len, times_ms.values())) < 2:
        return None
    found = {rank: min(two) for rank, two in times_ms.items()}
    rank, middle = max(found, key=found.get), statistics.median_low(found.values())
    return (rank, found[rank], middle) if found[rank] >= SLOW * middle else None
