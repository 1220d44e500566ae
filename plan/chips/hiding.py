"""Predict which collectives the TPU compiler overlaps with compute, and which it replaces with others.

The rules were found by reading the instruction schedules of programs compiled with the options in `compile/options.py`.
tests/plan/test_tpu.py checks v4's exposed bytes against them, within 10% of all bytes. On chips that are not in HIDES,
all communication counts as exposed.
"""

import math

from config import ModelAtWork
from plan.chips import hardware
from sharding import STAGE, TENSOR

GATHERS, SCATTERS, RINGS = "weights' gathers", "weights' gradients", "positions' permutes"
HIDES = {  # chip: the communication that it overlaps with matmuls. A SparseCore overlaps reductions of gradients
    "v4": {GATHERS, RINGS}, "v5e": {GATHERS}, "v5p": {SCATTERS, RINGS}, "v6e": {GATHERS, SCATTERS, RINGS},
    "tpu7x": {GATHERS, SCATTERS, RINGS},
}  # fmt: skip


def compiled_kind(kind: str, axes: tuple[str, ...], mesh: dict[str, int], platform: str, chip: str = "") -> str:
    """Return the kind of the compiled collective. On TPUs, a reduce-scatter over a whole slice of more than 4 chips
    becomes an all-reduce. Gradients of a layer's weights (pass their `chip`) avoid it: see `overlap/gradients.py`.
    """
    n = math.prod(mesh[axis] for axis in axes)
    if platform != "tpu" or n <= 4 or n < math.prod(mesh.values()):
        return kind
    if chip == "v5e" and kind in ("reduce-scatter", "all-reduce"):
        return "all-to-all"
    return "all-reduce" if kind == "reduce-scatter" else kind


LANES = 128  # lanes of a TPU vector, which hold the minor dim of an array
CMEM_BYTES = {"v4": 128 * 2**20}  # on-chip memory where v4's compiler also puts arrays: arXiv:2304.01433


def gradient_collective(dims: str, width: int, platform: str) -> str:
    """Return the compiled collective that reduces a parameter's gradient: a reduce-scatter, or on TPUs an all-reduce.

    dims   the letters of the parameter's dims, such as DHK (d_model, heads, head size); see `model.py`
    width  size of the device's shard along the sharded dim
    On TPUs it is an all-reduce if the sharded dim is contiguous in memory and `width` is not a multiple of LANES (128).
    It is contiguous in per-head matrices, in the embedding (VD) and in the LM head (DV), sharded by vocabulary. It
    stays a reduce-scatter if `width` divides LANES (except for DV), or is above LANES (only for VD).
    """
    if platform != "tpu" or width % LANES == 0 or not (dims in ("VD", "DV") or {*dims} & {*"HG"}):
        return "reduce-scatter"
    whole = dims != "DV" and LANES % width == 0
    return "reduce-scatter" if whole or (dims == "VD" and width > LANES) else "all-reduce"


def overlaps(chip: str, what: str) -> bool:
    return what in HIDES.get(chip, ())


def notes(chip: hardware.Chip) -> list[str]:
    """Return a warning if the overlap of a TPU's communication is not modeled."""
    unknown = chip.torus_dims and chip.key not in HIDES
    return ["overlap is not modeled for this chip, so all communication counts as exposed"] if unknown else []


def exposed(c: ModelAtWork, mesh: dict[str, int], chip: str, kind: str, axes, when: str, of: str) -> float:
    """Return the fraction of a collective's bytes that is exposed: not overlapped with compute.

    chip  a key of `hardware.CHIPS`, or ""
    when  forward, again (recomputed for the backward pass), or back (of gradients, in the backward pass)
    of    the part of a layer that the collective is for, or vocabulary. Empty: the collective is outside of loops and
          on the critical path
    """
    if not of or chip not in HIDES:
        return 1
    if axes == (TENSOR,):
        waits = kind == "collective-permute" and not rings_overlap(mesh, chip)
        return 1 if waits or kind == "reduce-scatter" else exposed_activations(c, kind, mesh[TENSOR], when, of)
    if of in ("weights", "experts", "vocabulary"):
        if kind == "all-gather":
            return exposed_weights(c, when, of) if overlaps(chip, GATHERS) else 1
        return float(kind != "all-to-all" and not overlaps(chip, SCATTERS))
    return 1


def rings_overlap(mesh: dict[str, int], chip: str) -> bool:
    """Return True if rings overlap with matmuls. For v5e, the compiler runs collective-permutes one after the other,
    except inside the lax.cond branches of pipeline parallelism."""
    return overlaps(chip, RINGS) or (chip == "v5e" and mesh[STAGE] > 1)


def exposed_activations(c: ModelAtWork, kind: str, n: int, when: str, of: str) -> float:
    """Return the exposed fraction of the bytes of a collective of activations over TENSOR (n devices).

    all-gather  In the forward pass it is exposed, because the next matmul needs its result. In the backward pass the
                all-gather of a gradient overlaps with matmuls for other gradients. If matmul outputs are saved, an
                all-gather that is repeated only for weight gradients overlaps too.
    ring        Its n - 1 sends overlap, except in the forward pass of models with d_model < 2048 (`is_wide`). There,
                n/2 - 1 sends before a feed-forward layer are exposed, because no matmul is ready yet. With remat
                "none" those overlap, but n/2 sends after attention are exposed, because no matmul is left.
    """
    if kind == "all-gather":
        return float(when == "forward" or (when == "again" and recomputes_matmuls(c.work.remat)))
    in_a_row = {"feed-forward": n // 2 - 1} if c.work.remat != "none" else {"attention's sums": n // 2}
    return in_a_row.get(of, 0) / (n - 1) if when == "forward" and not is_wide(c) else 0


def exposed_weights(c: ModelAtWork, when: str, of: str) -> float:
    """Return the fraction of weight all-gathers that is exposed.

    All-gathers run one after the other, and each overlaps with matmuls that use other weights. Of the experts' three
    matrices, the all-gather of one is exposed in the forward pass, and of two in the backward pass of a wide model.
    """
    return {"forward": 1, "again": 2 * is_wide(c)}[when] / 3 if of == "experts" else 0


def recomputes_matmuls(remat: str) -> bool:
    """Return True if the backward pass repeats matmuls with weights."""
    return remat not in ("none", "dots")


def is_wide(c: ModelAtWork) -> bool:
    """Return True if matmuls last long enough to overlap with: in llama3_8b and mixtral_8x7b, not in dense_124m."""
    return c.d_model >= 2048
