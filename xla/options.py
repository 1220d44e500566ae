"""Options that XLA's compilers are given, each platform's: by the trainer, and by the planner, which asks what it does.

`--run.compiler_options NAME=VALUE,..` adds to them, or says another value; `NAME=` leaves one of ours out.
"""

import contextlib

import jax
from jax.sharding import Mesh

from utils import UserError

OPTIONS = {
    # All safe: libtpu takes them for v4, v5e, v5p and v6e without a warning. The flags that fuse a collective with the
    # products beside it (xla_tpu_enable_async_collective_fusion*) are not here: on v4 libtpu warns of wrong results.
    "tpu": {
        "xla_enable_async_all_gather": "true",  # products may run between an all-gather's start and its end
        # A reduce-scatter stays one where its layout would make an all-reduce of it, with up to twice the bytes.
        "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
        "xla_tpu_assign_all_reduce_scatter_layout": "true",
    },
    "gpu": {},
    "cpu": {},
}
# Permutes that may be on their way at once. Where libtpu chooses, those of gradients hold up those of activations: of
# llama3_8b on fsdp=32,tensor=2 4.5 GB are exposed, and 2.4 with 8. Without `tensor` there is little to gain, and more
# of them keep more memory: 5.2 GiB at the peak on fsdp=64, not 4.8. By `python -m bench.overlap` as in
# docs/planner.md, with gather=ahead, and `--run.compiler_options xla_max_concurrent_async_collective_permutes=` or 8.
WITH_TENSOR = {"tpu": {"xla_max_concurrent_async_collective_permutes": "8"}}


def of(mesh: Mesh, asked: str = "") -> dict[str, str]:
    """What programs for a mesh's devices are compiled with: those of its platform, changed as `asked`.

    Raises: UserError for a text that is not NAME=VALUE,..
    """
    platform = mesh.devices.flat[0].platform
    more = WITH_TENSOR if mesh.shape.get("tensor", 1) > 1 else {}
    merged = OPTIONS.get(platform, {}) | more.get(platform, {}) | parse(asked)
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
        raise UserError(f"run.compiler_options: {str(error).splitlines()[0]}; NAME= leaves an option out") from None
