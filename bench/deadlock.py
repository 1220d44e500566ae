"""Reproduce a deadlock of simulated devices in a few lines of JAX.

    python bench/deadlock.py                 # XLA aborts after 20 s: one thread per device, and programs overlap
    python bench/deadlock.py --wait          # ok: each program ends before the next begins
    python bench/deadlock.py --threads 64    # ok: enough threads for several programs

Each collective of the program needs the result of the previous one, so all devices run them in the same order. But
XLA's CPU backend has only one thread per device, unless NPROC is larger. A thread that enters a collective blocks until
all devices of its group have entered, and JAX starts the next program before this one has ended. So devices that are
already in the next program block the threads that the others need to finish this one. (JAX 0.10.2. The file imports
nothing from this project, so it can be sent to the JAX developers as it is.) The exit status is 0 if the programs
ended, and 1 if XLA aborted.
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
    parser.add_argument("--threads", type=int, default=DEVICES, help=f"threads of XLA's pool (default: {DEVICES})")
    parser.add_argument("--wait", action="store_true", help="wait for each program before starting the next one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        call(args.wait)
        return 0
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "NPROC": str(args.threads),
                "XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=20"}  # fmt: skip
    words = [sys.executable, __file__, "--child", *["--wait"] * args.wait]
    done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, check=False)
    end = f"XLA aborted (exit status {done.returncode})" if done.returncode else "ok"
    print(f"{DEVICES} devices, {args.threads} threads, {CALLS} programs{', one at a time' * args.wait}: {end}")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
