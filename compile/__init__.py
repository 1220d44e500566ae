"""Compiler options, and analysis of the programs that XLA compiles.

Open `ledger.py` first: it counts a compiled program's collectives, bytes and FLOPs, and finds exposed communication.
`hlo.py` parses the program's text (HLO, XLA's intermediate language) for it. `ordered.py` provides a `jit` that runs
the collectives of simulated devices in a fixed order, which `ledger.py` checks. `options.py` has the compiler options
of each platform.

From outside: `ordered.jit` and `ordered.compile` in place of `jax.jit`; `ledger.read`.
"""
