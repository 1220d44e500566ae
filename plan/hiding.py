"""Predict which collectives the TPU compiler overlaps with compute, and which it replaces with others.

The rules were read from schedules compiled with the options of `xla/options.py`. tests/plan/test_tpu.py compares v4's
exposed bytes with them, within 10% of all bytes. On chips that are not in HIDES, all communication counts as exposed.
"""

import math

from config import ModelAtWork
from plan import formulas
from sharding import STAGE, TENSOR

WHOLE = ("full", "branches")  # remat policies that recompute matmuls
GATHERS, SCATTERS, RINGS = "weights' gathers", "weights' gradients", "positions' permutes"
HIDES = {  # chip: what it overlaps with matmuls. Where gradients overlap, a SparseCore sends them
    "v4": {GATHERS, RINGS}, "v5e": {GATHERS}, "v5p": {SCATTERS, RINGS}, "v6e": {GATHERS, SCATTERS, RINGS},
}  # fmt: skip


def compiled_kind(kind: str, axes: tuple[str, ...], mesh: dict[str, int], platform: str) -> str:
    """Return the compiled collective: over all chips of a slice, if more than 4, a reduce-scatter is an all-reduce."""
    if kind != "reduce-scatter" or platform != "tpu":
        return kind
    n = math.prod(mesh[axis] for axis in axes)
    return "all-reduce" if n > 4 and n == math.prod(mesh.values()) else kind


LANES = 128  # lanes of a TPU vector, which hold the minor dim of an array


def gradient_collective(dims: str, width: int, platform: str) -> str:
    """Return the collective of a parameter's gradient if each device has a shard this wide.

    The sharded dim is along lanes in per-head matrices, the embedding, and vocabulary chunks of an unembedding. There a
    width that is not a multiple of LANES makes it an all-reduce, except a divisor (not of DV), and a wider one of VD.
    """
    if platform != "tpu" or width % LANES == 0 or not (dims in ("VD", "DV") or {*dims} & {*"HG"}):
        return "reduce-scatter"
    whole = dims != "DV" and LANES % width == 0
    return "reduce-scatter" if whole or (dims == "VD" and width > LANES) else "all-reduce"


@formulas.by_cases
def overlaps(chip: str, what: str) -> bool:
    return any(chip == key and what in found for key, found in HIDES.items())


@formulas.by_cases
def exposed(c: ModelAtWork, mesh: dict[str, int], chip: str, kind: str, axes, when: str, of: str) -> float:
    """Return the exposed share of a collective's bytes.

    chip  a key of `hardware.CHIPS`, or ""
    when  forward, again (repeated for the backward pass) or back
    of    the part of a layer that it is for, or vocabulary; "": outside of loops, where the next matmul needs it
    """
    if not of or not any(chip == key for key in HIDES):
        return 1
    if axes == (TENSOR,):
        waits = kind == "collective-permute" and not rings_overlap(mesh, chip)
        return 1 if waits or kind == "reduce-scatter" else exposed_activations(c, kind, mesh[TENSOR], when, of)
    if of in ("weights", "experts", "vocabulary"):
        if kind == "all-gather":
            return exposed_weights(c, when, of) if overlaps(chip, GATHERS) else 1
        return float(not overlaps(chip, SCATTERS))
    return 1


@formulas.by_cases
def rings_overlap(mesh: dict[str, int], chip: str) -> bool:
    """Whether rings overlap. v5e's compiler runs permutes one after the other, except in the branches of a pipeline."""
    return overlaps(chip, RINGS) or (chip == "v5e" and mesh[STAGE] > 1)


def exposed_activations(c: ModelAtWork, kind: str, n: int, when: str, of: str) -> float:
    """Return the exposed share of activations over TENSOR.

    A forward all-gather is exposed: its result is needed at once. Gathers of gradients overlap with matmuls of other
    gradients. So does a gather that is repeated only for weight gradients, if matmul outputs are saved. A ring
    overlaps, except in narrow models: before a feed-forward, all but the last of half of its permutes run before a
    matmul can. With remat "none", instead, half of those after attention run when no matmul is left.
    """
    if kind == "all-gather":
        return float(when == "forward" or (when == "again" and c.work.remat in WHOLE))
    in_a_row = {"feed-forward": n // 2 - 1} if c.work.remat != "none" else {"attention's sums": n // 2}
    return in_a_row.get(of, 0) / (n - 1) if when == "forward" and not is_wide(c) else 0


def exposed_weights(c: ModelAtWork, when: str, of: str) -> float:
    """Return the exposed share of weight all-gathers, which run one after the other, each next to matmuls of others. Of
    the experts' three matrices, one is exposed in the forward pass, and two in the backward pass of a wide model.
    """
    return {"forward": 1, "again": 2 * is_wide(c)}[when] / 3 if of == "experts" else 0


def is_wide(c: ModelAtWork) -> bool:
    """Whether matmuls are long enough to overlap with: true for llama3_8b and mixtral_8x7b, not for dense_124m."""
    return c.d_model >= 2048
