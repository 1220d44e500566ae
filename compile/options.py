"""XLA compiler options for each kind of chip, which both the trainer and the planner use.

`--run.compiler_options NAME=VALUE,..` adds an option or changes its value; `NAME=` removes one of these.
"""

import contextlib
import re

import jax
from jax.sharding import Mesh

from utils import UserError

OPTIONS = {
    # libtpu accepts these for every TPU generation without a warning.
    "tpu": {
        "xla_enable_async_all_gather": "true",  # v4, v5e: matmuls may run between an all-gather's start and end
        # Without these three, layout turns some reduce-scatters into all-reduces, which send up to twice the bytes.
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
        "xla_tpu_assign_all_reduce_scatter_layout": "true",
    },
    # By default XLA issues collectives in program order. jaxlib accepts this option; its overlap is not measured here.
    # https://docs.jax.dev/en/latest/gpu_performance_tips.html
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": "true"},
    "cpu": {},
}
# SparseCores, a second kind of core on a TPU, communicate while the TensorCore computes. On v5p and v6e only these
# options overlap all-gathers and reduce-scatters without a libtpu warning. On TPU7x they are the default, v4 keeps the
# options it was measured with, and v5e has no SparseCore. The set is "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR" in
# benchmarks/xla_flags_library.py of github.com/AI-Hypercomputer/maxtext.
# Left out: flags that fuse a collective with the matmuls it overlaps (xla_tpu_enable_async_collective_fusion*). On v4,
# v5p and v6e libtpu warns that they may give wrong results; v5e overlaps without them.
SPARSECORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
}
# The all-to-alls of `overlap/gradients.py` overlap with matmuls. libtpu does not warn about the option, but it refuses
# all-to-alls over some parts of a slice ("Async all-to-all not supported on limited ICI"), so it is for whole slices.
ALL_TO_ALL = {"xla_tpu_enable_async_all_to_all": "true"}
# jax's device_kind: "TPU v5" is v5p, "TPU v6 lite" is v6e; other libtpu releases use the other names.
BY_KIND = dict.fromkeys(("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"), SPARSECORE)
BY_KIND |= dict.fromkeys(("TPU v5 lite", "TPU v5e"), ALL_TO_ALL)


def compiler_options(mesh: Mesh, asked: str = "") -> dict[str, str]:
    """Return the compiler options for a mesh's platform and chip, changed by the user's text `asked`.

    Raises: UserError if the text is not NAME=VALUE,..
    """
    device = mesh.devices.flat[0]
    ours = OPTIONS.get(device.platform, {}) | BY_KIND.get(device.device_kind, {})
    if device.platform == "gpu" and mesh.devices.size == 1:
        ours = {}  # no communication to overlap
    if mesh.shape.get("fsdp") != mesh.devices.size:
        ours = {name: value for name, value in ours.items() if name not in ALL_TO_ALL}
    merged = ours | parse(asked)
    return {name: {"true": True, "false": False}.get(value, value) for name, value in merged.items() if value}


def parse(text: str) -> dict[str, str]:
    """Parse NAME=VALUE,..; an empty value stays empty."""
    values = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise UserError(f"run.compiler_options={text!r}: {part!r} must be NAME=VALUE, or NAME= to remove an option")
        values[name.strip()] = value.strip()
    return values


@contextlib.contextmanager
def option_errors():
    """Context manager around a compilation. Raises: UserError for an unknown compiler option or an invalid value."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "compile option" not in str(error) and "While setting option" not in str(error):
            raise
        message = str(error).splitlines()[0]
        name = (re.search(r"No such compile option: '(\w+)'", message) or ["", ""])[1]
        if any(name in ours for ours in (*OPTIONS.values(), *BY_KIND.values())):
            raise UserError(
                f"this machine's compiler does not know the option {name} from compile/options.py; install a "
                f"newer one (TPU: make extra-tpu), or remove the option with --run.compiler_options {name}="
            ) from None
        raise UserError(f"run.compiler_options: {message}; NAME= removes an option") from None
