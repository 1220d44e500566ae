"""Simulated devices that wait for each other for ever, in a few lines of JAX alone.

    python bench/deadlock.py                 # XLA ends it after 20 s: a thread for each device, and programs overlap
    python bench/deadlock.py --wait          # ok: each program ends before the next begins
    python bench/deadlock.py --threads 64    # ok: threads enough for several programs

In the program every collective needs the result of the one before it, so nothing in it can be met in two orders. But
XLA's CPU backend has one thread for each device unless NPROC says more, a thread that meets a collective sleeps until
its group is complete, and JAX starts the next program before this one has ended: devices that have begun with it sleep
in its collectives, and hold the threads that the others need to end this one. (JAX 0.10.2. It needs nothing of this
project, so that it can be sent to JAX as it is.) Exit status 0: it ended; 1: XLA ended it.
"""

import argparse
import os
import subprocess
import sys

DEVICES, CALLS = 8, 200


def call(wait: bool) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec as P

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    total = lambda x: jax.lax.pcast(jax.lax.psum(x, "b"), "b", to="varying")

    def layer(x, i):
        y = jax.lax.cond(i % 2 == 0, lambda x: total(jnp.tanh(x)), lambda x: x * 2, x)
        z = jax.lax.ppermute(y, "a", [(0, 1), (1, 0)])
        return jnp.tanh(y + total(jnp.sort(z, axis=-1))), None

    local = lambda x: jax.lax.scan(layer, x, jnp.arange(40))[0]
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b")))
    x = jnp.ones((64, 4096))
    for _ in range(CALLS):
        x = program(x)
        if wait:
            x.block_until_ready()
    x.block_until_ready()


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python bench/deadlock.py", description=__doc__, formatter_class=form)
    parser.add_argument("--threads", type=int, default=DEVICES, help=f"of XLA's pool (default: {DEVICES}, the devices)")
    parser.add_argument("--wait", action="store_true", help="for the end of each program, before the next begins")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        call(args.wait)
        return 0
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "NPROC": str(args.threads),
                "XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=20"}  # fmt: skip
    words = [sys.executable, __file__, "--child", *["--wait"] * args.wait]
    done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, check=False)
    end = f"XLA ended it (exit status {done.returncode})" if done.returncode else "ok"
    print(f"{DEVICES} devices, {args.threads} threads, {CALLS} programs{', each waited for' * args.wait}: {end}")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
