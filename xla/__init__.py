"""What the compiler is told, and what it did.

Open `ledger.py` first: it counts what a compiled program does, its collectives, bytes and FLOPs, and which wires wait;
`hlo.py` reads the program's text for it. `ordered.py` is `jit` for simulated devices, which keeps their collectives in
one order and has `ledger.py` check that none can change places.
`replay.py` plays a scheduled program against time, on the links of `links.py`, with the memory traffic of `moved.py`.
`options.py` has what a compiler is told beside the program, each platform's.

From outside: `ordered.jit` and `ordered.compile` in place of `jax.jit`; `ledger.read`; `replay.replay`.
"""
