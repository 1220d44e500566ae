"""The operations that `python -m bench.report` times: matmuls, attention, passes over memory, collectives.

One program repeats an operation so often that dispatch takes a negligible part of the time. Each repetition depends on
the one before, so that the compiler cannot remove any.
"""

import functools
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import sharding
from bench.gpu import ROOT
from bench.step import say
from config import MeshConfig
from kernels import attention as kernels
from kernels.blocks import CAUSAL
from plan.chips import hardware
from sharding import FSDP

SAMPLES = 5  # timed programs per row; the median counts
PROGRAM_S = {False: 0.05, True: 0.002}  # planned seconds of one program; True: small shapes


class Chip(NamedTuple):
    """What the plan knows of this device; None where it knows nothing."""

    small: bool  # measure small shapes
    dtype: Any
    flops_per_s: float | None
    bytes_per_s: float | None

    def seconds(self, flops: float, moved_bytes: float) -> float | None:
        """Return the planner's seconds of a matmul: the longer of its FLOPs and its bytes."""
        return self.flops_per_s and max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


class Case(NamedTuple):
    """An operation to time: step(*arrays) returns arrays of the same shapes."""

    name: str
    step: Callable
    arrays: list[tuple[tuple[int, ...], float]]  # shape and standard deviation of each
    amount: float  # FLOPs, or bytes
    unit: Literal["TFLOP/s", "GB/s"]
    plan_s: float | None
    dtype: Any
    unroll: int = 1  # repetitions per iteration of the loop, for operations of microseconds
    sharding: Any = None


def depend(x, y):
    """Return x, with one element that depends on y. So y must be computed before the next repetition."""
    corner = lambda of: jax.lax.slice(of, (0,) * of.ndim, (1,) * of.ndim).reshape((1,) * x.ndim)
    changed = corner(x) + 1e-6 * corner(jax.lax.optimization_barrier(y)).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, changed, (0,) * x.ndim)


def matmuls(chip: Chip) -> Iterator[Case]:
    """Square matmuls, a feed-forward block of several widths, and the gradient of its first weight."""
    width = np.dtype(chip.dtype).itemsize

    def case(name, step, arrays, *shapes):  # a shape is (m, k, n)
        flops = sum(2 * m * k * n for m, k, n in shapes)
        plan = [chip.seconds(2 * m * k * n, width * (m * k + k * n + m * n)) for m, k, n in shapes]
        return Case(name, step, arrays, flops, "TFLOP/s", sum(plan) if plan[0] else None, chip.dtype, 4)

    widths, tokens = ((64,), (128,)) if chip.small else ((4096, 1024, 8192, 2048), (4096, 32768, 1024))
    for n in (128,) if chip.small else (8192, 4096, 2048, 16384, 1024):
        yield case(f"{n} x {n} x {n}", lambda x, w: (x @ w, w), [((n, n), 1), ((n, n), n**-0.5)], (n, n, n))
    for T in tokens:
        for D in widths:
            F = 4 * D
            arrays = [((T, D), 1), ((D, F), D**-0.5), ((F, D), F**-0.5)]
            yield case(f"{T} tokens, {D} x {F} and back", lambda x, up, down: (x @ up @ down, up, down), arrays,
                       (T, D, F), (T, F, D))  # fmt: skip
            if tokens[0] == T:
                yield case(f"{T} tokens, gradient of {D} x {F}", lambda x, dy: (depend(x, x.T @ dy), dy),
                           [((T, D), 1), ((T, F), 1)], (D, T, F))  # fmt: skip


def attention(chip: Chip) -> Iterator[Case]:
    """Causal attention as the trainer computes it, and cuDNN's on a GPU. FLOPs are of the unmasked half."""
    tokens, width, where = 16384, np.dtype(chip.dtype).itemsize, jax.devices()[0].platform
    lengths, heads = (1024, 4096, 16384), ((64, 32, 32), (128, 16, 16), (128, 16, 4))
    if chip.small:
        tokens, lengths, heads = 128, (64,), ((16, 4, 2),)
    for s, (K, h, g) in ((s, one) for one in heads for s in lengths):
        b = tokens // s
        documents = jnp.zeros((b, s), jnp.int32)
        ours = lambda *qkv, documents=documents: kernels.partial_attention(*qkv, documents, documents)[0]
        library = lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="cudnn")
        counted = kernels.count_visits(s, s, CAUSAL, K, K, width, where)
        costs = zip(kernels.flops(counted, h, K, K), kernels.hbm_bytes(counted, s, s, h, g, K, K, width), strict=True)
        ahead_s, back_s = (chip.seconds(b * flops, b * moved) for flops, moved in costs)
        arrays, flops = [((b, s, h, K), 1), ((b, s, g, K), 1), ((b, s, g, K), 1)], 2 * b * h * s**2 * K
        name = f"{b} x {s} tokens, {h} heads of {K}" + f", {g} of keys" * (g < h)
        make = lambda name, step, arrays, flops, plan_s: Case(name, step, arrays, flops, "TFLOP/s", plan_s, chip.dtype)
        forward = lambda q, k, v, ours=ours: (depend(q, ours(q, k, v)), k, v)
        yield make(f"{name}, forward", forward, arrays, flops, ahead_s)
        for who, of in [("", ours)] + [(", cuDNN", library)] * (where == "gpu"):

            def both(q, k, v, d, of=of):
                out, pull = jax.vjp(of, q, k, v)
                return *map(depend, (q, k, v), pull(d)), depend(d, out)

            plan_s = None if who or not ahead_s else ahead_s + back_s
            yield make(f"{name}, forward and backward{who}", both, [*arrays, arrays[0]], 3.5 * flops, plan_s)


def memory(chip: Chip) -> Iterator[Case]:
    """Passes over arrays in memory: read only, read and write, and an optimizer's update of four arrays."""

    def update(p, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v, g

    for n in (2**14,) if chip.small else (2**28, 2**25):
        x, size = ((n,), 1), f"{4 * n / 2**20:g} MiB"
        for name, step, arrays, moved in (
            (f"sum of {size}", lambda x, s: (x, 1e-9 * jnp.sum(jnp.maximum(x, s))), [x, ((), 1)], 4 * n),
            (f"scale {size}", lambda x: (1.0001 * x,), [x], 8 * n),
            (f"update 4 x {size}", update, [x] * 4, 28 * n),
        ):
            plan_s = chip.bytes_per_s and moved / chip.bytes_per_s
            yield Case(name, step, arrays, moved, "GB/s", plan_s, jnp.float32)


def collectives(chip: Chip) -> Iterator[Case]:
    """Collectives over all devices, by bytes that one device sends. Sizes are of the gathered array."""
    n, mesh_config = jax.device_count(), MeshConfig(fsdp=jax.device_count())
    mesh, topology = sharding.make_mesh(mesh_config), hardware.topology_of_devices(jax.devices())
    link = topology and hardware.layout(mesh_config, topology)["fsdp"]
    kinds = {
        "all-gather": lambda x: sharding.all_gather(x, FSDP, dim=0),
        "reduce-scatter": lambda x: sharding.reduce_scatter(x, FSDP, dim=0),
        "all-reduce": lambda x: sharding.psum(x, FSDP),
        "all-to-all": lambda x: sharding.all_to_all(x, FSDP, split_dim=0, join_dim=0),
    }
    for size in (2**12,) if chip.small else (2**26, 2**20, 2**29):
        for kind, collective in kinds.items():
            entries = size // np.dtype(chip.dtype).itemsize // n * n
            step = jax.shard_map(lambda x, collective=collective: (depend(x, collective(x)),), mesh=mesh,
                                 in_specs=P(FSDP), out_specs=P(FSDP))  # fmt: skip
            gathered = size * (n if kind == "all-to-all" else 1)
            known = link and hardware.collective_seconds(kind, gathered, n, link) + hardware.latency_seconds(kind, link)
            shape = (entries,) if kind == "all-gather" else (n * entries,)
            sent, where = hardware.wire_bytes(kind, gathered, n), NamedSharding(mesh, P(FSDP))
            yield Case(f"{kind}, {size / 2**20:g} MiB", step, [(shape, 1)], sent, "GB/s", known, chip.dtype, 1, where)


def draw(case: Case):
    """Draw the arrays of a case, uniformly, with the given standard deviations."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(case.arrays))
    uniform = lambda key, shape, std: jax.random.uniform(key, shape, case.dtype, -std * 3**0.5, std * 3**0.5)
    return tuple(uniform(key, *one) for key, one in zip(keys, case.arrays, strict=True))


def repeat(case: Case, calls: int, *arrays):
    return jax.lax.fori_loop(0, calls, lambda _, xs: case.step(*xs), arrays, unroll=case.unroll)


def time_case(case: Case, small: bool) -> dict:
    """Compile and time one operation. Returns its row."""
    guess_s = case.plan_s or case.amount / (1e11 if case.unit == "TFLOP/s" else 1e10)
    calls = case.unroll * min(max(round(PROGRAM_S[small] / guess_s / case.unroll), 1), 256)
    arrays = jax.jit(lambda: draw(case), out_shardings=case.sharding)()
    begin = time.perf_counter()
    kept = jax.jit(functools.partial(repeat, case, calls), donate_argnums=range(len(arrays)))
    program = kept.lower(*arrays).compile()
    compile_s, seconds = time.perf_counter() - begin, []
    for _ in range(SAMPLES + 1):
        begin = time.perf_counter()
        arrays = jax.block_until_ready(program(*arrays))
        seconds.append((time.perf_counter() - begin) / calls)
    median = statistics.median(seconds[1:])  # the first is a warm-up
    scale = {"TFLOP/s": 1e12, "GB/s": 1e9}[case.unit]
    return {"seconds": median, "min_s": min(seconds[1:]), "max_s": max(seconds[1:]), "calls": calls,
            "amount": case.amount, "rate": case.amount / median / scale, "unit": case.unit, "plan_s": case.plan_s,
            "compile_s": compile_s}  # fmt: skip


def describe(error: BaseException) -> str:
    """Return an error as text, without paths and names of this machine, and at most 600 characters."""
    text = f"{type(error).__name__}: {error}"
    for word in (str(ROOT), str(Path.home()), tempfile.gettempdir(), socket.gethostname()):
        text = text.replace(word, "...") if len(word) > 1 else text
    return text[:600]


PARTS = {"memory": memory, "matmul": matmuls, "attention": attention, "collectives": collectives}


def measure(part: str, small: bool, seconds: float) -> Iterator[dict]:
    """Yield the rows of a part, or a row's error. When the part's time is over, yield only the names of its rows."""
    begin, kind, dtype = time.monotonic(), jax.devices()[0].device_kind, jnp.float32 if small else jnp.bfloat16
    known = next((chip for chip in hardware.CHIPS.values() if chip.device_kind == kind), hardware.CHIPS["cpu"])
    for case in PARTS[part](Chip(small, dtype, known.peak_flops_per_s, known.hbm_bytes_per_s)):
        if time.monotonic() - begin > seconds:
            yield {"name": case.name, "left_out": "out of time"}
            continue
        say(f"  {case.name} ...")
        try:
            yield {"name": case.name} | time_case(case, small)
        except Exception as error:
            yield {"name": case.name, "error": describe(error)}
