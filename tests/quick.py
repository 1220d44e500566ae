"""XLA's flags for programs that run a few steps: faster to compile, and slower to run.

Import it, and call `compile_quickly`, before the first use of a device. Not for benchmarks: what is measured is another
program. Verdicts are the same: no collective, and no formula, is another one.
"""

import os

FLAGS = {
    "xla_cpu_use_fusion_emitters": "false",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_backend_optimization_level": "0",
    "xla_cpu_max_isa": "SSE4_2",
}


def compile_quickly() -> None:
    """In this process and those it starts. Flags that are set already stay as they are."""
    given = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={value}" for name, value in FLAGS.items() if f"--{name}=" not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()
