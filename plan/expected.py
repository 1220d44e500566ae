"""How long a step takes as compiled: what a replay of its schedule would say, by arithmetic.

`Plan.seconds` is a roofline: each product at the chip's peak, each wire at its full speed, and all that the compiler
puts beside products hidden. Compiled steps, played against time (`xla/replay.py`), take a fifth to twice as long. Four
rules say why; their numbers were read off replays of compiled steps, of four presets on v4, v5e, v5p and v6e, and
`python -m bench.plan` prints both beside each other:

- A product takes PRODUCT of its FLOPs at the peak, and MOVED of the time in which its operands and results move: so a
  narrow one is far from the peak. Kernels, of attention and experts, take the longer of the two.
- The rest of a layer reads and writes its stream, what it keeps, its experts' rows and its weights several times. v4
  keeps a part of it in its CMEM; on other chips it is OTHERS times as much.
- A permute of positions is hidden as long as the product beside it lasts, and no longer: interval by interval.
- What no products stand beside is waited for, as `hiding.py` says chip by chip; of weights' gathers also what takes
  longer than the products that use them, and of gradients that a SparseCore sends while products run, HELD_UP.
"""

from plan import costs, formulas, hardware, hiding
from plan.costs import Sizes
from plan.formulas import maximum, present, where
from sharding import SLICED, TENSOR

# Read off the causes of played steps (`python -m bench.plan --json` has both), MOVED, STREAM, KEPT and ROWS by least
# squares over v4's, the others by eye: PRODUCT and OTHERS of each chip, and for one that was not played v5p's.
PRODUCT, MOVED = {"v4": 1.1, "v5e": 1.02, "v5p": 1.16, "v6e": 1.37}, 0.88
OTHERS = {"v4": 1.0, "v5e": 1.5, "v5p": 2.2, "v6e": 2.7}
STREAM, KEPT, ROWS, STATE = 1.5, 2.7, 1.4, 5  # times that these bytes are moved
ADDED = 12  # bytes moved for each entry of a sum: read, written, and what is added
HELD_UP = 0.25  # share of the seconds of gradients that are on their way behind products


def seconds(one) -> dict[str, float] | None:
    """Seconds of a step by cause: products, other ops, waiting by mesh axes, bubble. None: not known for such a chip.

    one  a `planner.Plan`
    """
    chip = one.topology and one.topology.chip
    if not chip or not chip.torus_dims:
        return None
    found = {"products": products(one, chip), "other ops": others(one, chip) / chip.hbm_bytes_per_s}
    ring = hiding.rings_hide(one.cfg.mesh.sizes, chip.key)
    scatters = hiding.hides(chip.key, hiding.SCATTERS)
    run, in_slots = costs.passes(one.cfg, one.sched), sum(found.values())
    use_weights = (run.forward + run.again) / (run.forward + run.again + run.inputs + run.weights)
    for row in one.traffic:
        speed, name = one.speed(row), "*".join(row.axes)
        waits = row.exposed_bytes / speed
        if row.part == "gradients" and {*row.axes} <= {*SLICED}:
            waits = where(scatters, maximum(waits, HELD_UP * row.wire_bytes / speed), waits)
        elif row.part == "weights":
            hidden = (row.wire_bytes - row.exposed_bytes) / speed
            waits += maximum(hidden - use_weights * found["products"], 0)
        elif row.kind == "collective-permute" and row.axes == (TENSOR,) and present(ring):
            waits = where(ring, positions(one, speed, chip), waits)
        found[name] = found.get(name, 0.0) + waits
        in_slots += waits * row.in_a_slot
    found["bubble"] = in_slots * one.bubble / (1 - one.bubble)
    return found


@formulas.by_cases
def of_chip(numbers: dict[str, float], chip: hardware.Chip) -> float:
    return next((number for key, number in numbers.items() if chip.key == key), numbers["v5p"])


def slower(chip: hardware.Chip) -> float:
    """Times that a product takes of what its FLOPs take at the peak."""
    return of_chip(PRODUCT, chip)


def products(one, chip: hardware.Chip) -> float:
    """Seconds of all products."""
    total = 0.0
    for row in one.work:
        computing, moving = row.flops / chip.peak_flops_per_s, row.hbm_bytes / chip.hbm_bytes_per_s
        total += maximum(computing, moving) if row.part == "experts" else slower(chip) * computing + MOVED * moving
    return total


@formulas.by_cases
def others(one, chip: hardware.Chip) -> float:
    """Bytes that all but products move."""
    cfg, c, sched = one.cfg, one.cfg.at_work, one.sched
    z, run, step = Sizes.of(cfg, "tpu"), costs.passes(cfg, sched), c.work.gather == "step"
    layers = c.n_layers / cfg.mesh.stage
    stream = z.b * z.s * c.d_model * z.width * layers
    passes = run.forward + run.again * (c.work.remat != "dots") + run.inputs + run.weights
    kept = one.memory_bytes["saved"] * (sched.microbatches if cfg.mesh.stage == 1 else 1)
    rows = sum(row.hbm_bytes for row in one.work if row.part == "experts")
    activations = STREAM * stream * passes + KEPT * kept + ROWS * rows
    # Sums of gradients in float32, a microbatch after the other: read, written, and what is added.
    sums = sum(w.joined if step else w.held for w in costs.weights(cfg))
    added = ADDED * sums * sched.microbatches * (not sched.in_one_piece or step)
    state = one.memory_bytes["parameters"] + one.memory_bytes["optimizer"]
    return of_chip(OTHERS, chip) * activations + added + STATE * state


def positions(one, speed: float, chip: hardware.Chip) -> float:
    """Seconds waited for rings over TENSOR: each part's permute against the product of another part."""
    return waits_of_rings(one, speed, chip.peak_flops_per_s / slower(chip))


@formulas.by_cases
def waits_of_rings(one, speed: float, peak: float) -> float:
    cfg, c = one.cfg, one.cfg.at_work
    z, run, n = Sizes.of(cfg, "tpu"), costs.passes(cfg, one.sched), cfg.mesh.tensor
    waits = 0.0
    for many, rows in filter(lambda layer: present(layer[0]), costs.layers(c, z)):
        exchanges = [row for row in rows if isinstance(row, costs.Exchange) and row.axes == (TENSOR,)
                     and row.kind == "collective-permute"]  # fmt: skip
        for exchange, product in zip(exchanges, beside(rows)[: len(exchanges)], strict=True):
            part = product * (n - 1) / n
            took = lambda times, row=exchange, part=part: maximum(0.0, row.times * row.size / speed - times * part)
            ahead = run.forward + run.again * exchange.again
            waits += many * (ahead * took(1 / peak) + run.inputs * took(2 / peak))
    return waits


BESIDE = (  # functions of the model whose matmuls each ring of a layer overlaps with: arriving and leaving, twice
    ("latent_queries", "queries_keys_values"), ("latent_attention.<lambda>", "grouped_attention.out"), ("hidden",),
    ("down",),
)  # fmt: skip


def beside(rows: list) -> list[float]:
    """FLOPs of the matmuls that each ring of a layer overlaps with: arriving and leaving, attention's first."""
    of = lambda names: sum(x.flops for x in rows if isinstance(x, costs.Product) and x.function in names)
    return [of(names) for names in BESIDE]
