"""Options that XLA's compilers are given, each chip's: by the trainer, and by the planner, which asks what it does.

`--run.compiler_options NAME=VALUE,..` adds to them, or says another value; `NAME=` leaves one of ours out.
"""

import contextlib
import re

import jax
from jax.sharding import Mesh

from errors import UserError

OPTIONS = {
    # libtpu takes them for every generation without a warning.
    "tpu": {
        "xla_enable_async_all_gather": "true",  # v4, v5e: products may run between an all-gather's start and its end
        # A reduce-scatter stays one where its layout would make an all-reduce of it, with up to twice the bytes.
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
        "xla_tpu_assign_all_reduce_scatter_layout": "true",
    },
    # XLA's default is to issue collectives as they come. jaxlib knows the option; what it hides was not seen here.
    # https://docs.jax.dev/en/latest/gpu_performance_tips.html
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": "true"},
    "cpu": {},
}
# SparseCores send while the TensorCore computes. On v5p and v6e nothing else that libtpu does not warn of hides a
# gather or a scatter; on TPU7x it is the default; v4 is left as it was measured, and v5e has none. Which are needed
# together: "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR" in benchmarks/xla_flags_library.py of
# github.com/AI-Hypercomputer/maxtext.
# Not here: the flags that fuse a collective with the products beside it (xla_tpu_enable_async_collective_fusion*). On
# v4, v5p and v6e libtpu warns that they may give wrong results; v5e has what it needs without.
SPARSECORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
}
# jax's device_kind: "TPU v5" is v5p, "TPU v6 lite" v6e; other releases of libtpu say it the other way.
BY_KIND = dict.fromkeys(("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"), SPARSECORE)


def of(mesh: Mesh, asked: str = "") -> dict[str, str]:
    """What programs for a mesh's devices are compiled with: those of its platform and chip, changed as `asked`.

    Raises: UserError for a text that is not NAME=VALUE,..
    """
    device = mesh.devices.flat[0]
    ours = OPTIONS.get(device.platform, {}) | BY_KIND.get(device.device_kind, {})
    if device.platform == "gpu" and mesh.devices.size == 1:
        ours = {}  # nothing to hide
    merged = ours | parse(asked)
    return {name: {"true": True, "false": False}.get(value, value) for name, value in merged.items() if value}


def parse(text: str) -> dict[str, str]:
    """Read NAME=VALUE,..; an empty value stays empty."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise UserError(f"run.compiler_options={text!r}: {part!r} should be NAME=VALUE, or NAME= to leave one out")
        found[name.strip()] = value.strip()
    return found


@contextlib.contextmanager
def refused():
    """While a program is compiled: an option that the compiler does not know, or cannot read, is the user's to mend."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "compile option" not in str(error) and "While setting option" not in str(error):
            raise
        said = str(error).splitlines()[0]
        name = (re.search(r"No such compile option: '(\w+)'", said) or ["", ""])[1]
        if any(name in ours for ours in (*OPTIONS.values(), SPARSECORE)):
            raise UserError(
                f"this machine's compiler does not know {name}, which xla/options.py gives it: install a "
                f"newer one (TPU: make extra-tpu), or say --run.compiler_options {name}="
            ) from None
        raise UserError(f"run.compiler_options: {said}; NAME= leaves an option out") from None
