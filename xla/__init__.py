"""Compiler options, and analysis of the programs that XLA compiles.

Open `ledger.py` first: it counts a compiled program's collectives, bytes and FLOPs, and finds exposed communication.
`hlo.py` parses the program's text for it. `ordered.py` provides `jit` for simulated devices, which runs collectives in
one order, and has `ledger.py` check that order.
`replay.py` simulates the time of a scheduled program, with the links of `links.py` and the memory traffic of
`moved.py`. `options.py` has the compiler options of each platform.

From outside: `ordered.jit` and `ordered.compile` in place of `jax.jit`; `ledger.read`; `replay.replay`.
"""
