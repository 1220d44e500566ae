"""Set XLA flags for programs that run only a few steps: they compile faster and run slower.

Call `compile_quickly` before the first use of a device. Do not use it for benchmarks, because it changes the compiled
program. It does not change test results: collectives and formulas stay the same.
"""

import os
from importlib.metadata import version

FLAGS = {
    "xla_llvm_disable_expensive_passes": "true",
    "xla_backend_optimization_level": "0",
    "xla_cpu_max_isa": "SSE4_2",
}
if version("jaxlib").startswith("0.10."):  # jaxlib 0.11.2 ends the process with: Unknown flag in XLA_FLAGS
    FLAGS["xla_cpu_use_fusion_emitters"] = "false"


def compile_quickly() -> None:
    """Set the flags for this process and its children. Flags that are already set do not change."""
    given = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={value}" for name, value in FLAGS.items() if f"--{name}=" not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()
