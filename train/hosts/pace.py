"""Find a slow host (a straggler). Every step waits for the slowest host, so step times do not show which host it is.

Each process times matmuls on its first device while the devices are idle. This detects a throttled chip or core. A
device that another program uses now and then is not reported, because only the shortest of many attempts counts.
"""

import functools
import math
import statistics
import time
import timeit
from collections.abc import Callable

import jax
import jax.numpy as jnp

SLOW = 1.5  # a host is slow if its time is at least this many times the median
SHARE = 1000  # measure during 1 / SHARE of the time
# On a CPU one attempt is shorter than a time slice of the scheduler. In 12 measurements with two processes on 2 cores,
# and four other busy processes, the shortest of 40 attempts varied by 8%, and the shortest of 5 10x longer ones by 3x.
ATTEMPTS = 40


class Pace:
    """Measures the speed of this process's device, rarely enough that the cost is negligible."""

    def __init__(self):
        self.due = -math.inf

    def measure(self) -> float | None:
        """Return the time of the matmuls in ms, or None if no measurement is due or the device's memory is full."""
        if time.monotonic() < self.due:
            return None
        try:
            work = compile_matmuls()
        except jax.errors.JaxRuntimeError:  # the device's memory is full
            self.due = math.inf
            return None
        times_s = timeit.repeat(work, number=1, repeat=ATTEMPTS)
        self.due = time.monotonic() + SHARE * sum(times_s)
        return 1000 * min(times_s)


@functools.cache
def compile_matmuls() -> Callable[[], None]:
    """Compile a function that runs matmuls on the first device for about 1 ms: 0.34 TFLOP, or 42 MFLOP on a CPU."""
    device = jax.local_devices()[0]
    size, count, dtype = (128, 10, jnp.float32) if device.platform == "cpu" else (2048, 20, jnp.bfloat16)
    x_NN = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)  # all its powers are equal
    power = jax.jit(lambda x_NN: jax.lax.fori_loop(0, count, lambda _, y_NN: y_NN @ x_NN, x_NN)).lower(x_NN).compile()
    jax.block_until_ready(power(x_NN))  # the first call takes longer
    return lambda: jax.block_until_ready(power(x_NN))


def slowest(times_ms: dict[int, list[float]]) -> tuple[int, float, float] | None:
    """Return the rank of a slow process, its time and the median time, from {rank: last two times}.

    None: no process is slow, or some process has fewer than two measurements. The shorter one counts, so a host that is
    busy only for a while is not reported.
    """
    if len(times_ms) < 2 or min(map(len, times_ms.values())) < 2:
        return None
    best_ms = {rank: min(two) for rank, two in times_ms.items()}
    rank, middle = max(best_ms, key=best_ms.get), statistics.median_low(best_ms.values())
    return (rank, best_ms[rank], middle) if best_ms[rank] >= SLOW * middle else None
