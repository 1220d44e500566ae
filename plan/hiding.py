"""What of a step's wires stands beside products in the schedule that the TPU compiler makes, and what it sends instead.

Rules, read off schedules compiled with the options of `xla/options.py`; tests/plan/test_tpu.py holds v4's exposed bytes
to them, within 10% of all bytes. Of a chip that HIDES does not name no schedule is known: there all is exposed.
"""

import math

from config import ModelAtWork
from plan import formulas
from sharding import STAGE, TENSOR

WHOLE = ("full", "branches")  # remat policies that repeat products
GATHERS, SCATTERS, RINGS = "weights' gathers", "weights' gradients", "positions' permutes"
HIDES = {  # chip: of what it sends, what stands beside products. A SparseCore is what sends gradients
    "v4": {GATHERS, RINGS}, "v5e": {GATHERS}, "v5p": {SCATTERS, RINGS}, "v6e": {GATHERS, SCATTERS, RINGS},
}  # fmt: skip


def made_of(kind: str, axes: tuple[str, ...], mesh: dict[str, int], platform: str) -> str:
    """The collective that is compiled: over all chips of a slice, if more than 4, a reduce-scatter is an all-reduce."""
    if kind != "reduce-scatter" or platform != "tpu":
        return kind
    n = math.prod(mesh[axis] for axis in axes)
    return "all-reduce" if n > 4 and n == math.prod(mesh.values()) else kind


LANES = 128  # of a TPU's vector: the entries of an array's narrowest dim lie along them


def scatter_of(dims: str, width: int, platform: str) -> str:
    """The collective of a parameter's gradient, of which a device keeps a slice this wide.

    The sliced dim lies along lanes: of matrices by head, of the embedding, and of an unembedding in slices of words.
    What is no whole vector, nor an even share of one, is cut out of a sum; of slices of words, a share too.
    """
    if platform != "tpu" or width % LANES == 0 or not (dims in ("VD", "DV") or {*dims} & {*"HG"}):
        return "reduce-scatter"
    whole = dims != "DV" and LANES % width == 0
    return "reduce-scatter" if whole or (dims == "VD" and width > LANES) else "all-reduce"


@formulas.by_cases
def hides(chip: str, what: str) -> bool:
    return any(chip == key and what in found for key, found in HIDES.items())


@formulas.by_cases
def exposed(c: ModelAtWork, mesh: dict[str, int], chip: str, kind: str, axes, when: str, of: str) -> float:
    """The share of a collective's bytes that no products stand beside.

    chip  as `hardware.CHIPS` names it, or none
    when  forward, again (repeated for the backward pass) or back
    of    the part of a layer that it is for, or vocabulary; "": outside of loops, where the next product waits for it
    """
    if not of or not any(chip == key for key in HIDES):
        return 1
    if axes == (TENSOR,):
        waits = kind == "collective-permute" and not rings_hide(mesh, chip)
        return 1 if waits or kind == "reduce-scatter" else of_positions(c, kind, mesh[TENSOR], when, of)
    if of in ("weights", "experts", "vocabulary"):
        if kind == "all-gather":
            return of_weights(c, when, of) if hides(chip, GATHERS) else 1
        return float(not hides(chip, SCATTERS))
    return 1


@formulas.by_cases
def rings_hide(mesh: dict[str, int], chip: str) -> bool:
    """v5e's compiler puts the permutes of a ring one behind the other; but not in a branch, where stages compute."""
    return hides(chip, RINGS) or (chip == "v5e" and mesh[STAGE] > 1)


def of_positions(c: ModelAtWork, kind: str, n: int, when: str, of: str) -> float:
    """A gather is needed at once. One of gradients has the products of other gradients beside it, and so has one that
    is repeated for weight gradients alone: where products are kept.

    A ring hides, but for narrow products. Half of its entries come one after the other: in front of a feed-forward all
    but the last are handed on before there is a product to run. Or, where nothing is computed again, the compiler sends
    half of attention's sums while it writes what is kept, when no product is left.
    """
    if kind == "all-gather":
        return float(when == "forward" or (when == "again" and c.work.remat in WHOLE))
    in_a_row = {"feed-forward": n // 2 - 1} if c.work.remat != "none" else {"attention's sums": n // 2}
    return in_a_row.get(of, 0) / (n - 1) if when == "forward" and not wide(c) else 0


def of_weights(c: ModelAtWork, when: str, of: str) -> float:
    """All-gathers run one after the other, each beside products that do not need it. Experts' three matrices are most
    of a layer, and one finds none; of wide models two do, where products are repeated.
    """
    return {"forward": 1, "again": 2 * wide(c)}[when] / 3 if of == "experts" else 0


def wide(c: ModelAtWork) -> bool:
    """Whether products are long enough to hide behind: as llama3_8b's and mixtral_8x7b's, not dense_124m's."""
    return c.d_model >= 2048
