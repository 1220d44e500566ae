"""Count what Muon's matrices cost one device in a step: FLOPs, bytes sent and memory, in the two layouts of `muon.py`.

FLOPs and bytes are exact: tests/test_muon.py compares them with the compiled update.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import muon
import optimizer
from config import Config
from config.fields import parse_muon
from parameters import as_stored
from plan.count.networks import Collective
from plan.count.weights import weights

MUON, NEWTON_SCHULZ = "muon", "newton_schulz"  # the part of these costs in a plan, and the name of their matmuls


@dataclass(frozen=True)
class Matrices:
    """A stack of matrices, of which a device has shards."""

    stack: muon.Stack
    mesh: dict[str, int]
    local_size: int  # entries of the device's shards
    layout: str
    steps: int
    width: int  # bytes of an entry in matmuls and when it is sent

    @property
    def shards(self) -> int:
        """Devices that share a matrix."""
        return math.prod(self.mesh[axis] for axis in self.stack.owner_axes)

    @property
    def size(self) -> int:
        """Entries of one matrix."""
        return math.prod(self.stack.shape)

    @property
    def count(self) -> int:
        return self.local_size * self.shards // self.size

    @property
    def computed(self) -> int:
        """Matrices that a device orthogonalizes, with padding."""
        return -(-self.count // self.shards) if self.layout == "owner" else self.count

    @property
    def flops(self) -> float:
        """FLOPs of the Newton-Schulz iterations."""
        small, large = sorted(self.stack.shape)
        return self.computed * self.steps * (4 * small**2 * large + 2 * small**3)

    @property
    def hbm_bytes(self) -> float:
        """Operands and results of the three matmuls of each step."""
        small, large = sorted(self.stack.shape)
        return self.computed * self.steps * (3 * small * large + 5 * small**2) * self.width

    def collectives(self) -> Iterator[Collective]:
        if self.layout == "owner":
            yield Collective("all-to-all", self.stack.owner_axes, self.computed * self.size * self.width, 2, MUON)
            return
        gathered = self.size // self.shards
        for axes, _ in self.stack.gather_order:
            gathered *= math.prod(self.mesh[axis] for axis in axes)
            yield Collective("all-gather", axes, gathered * self.width, self.count, MUON)

    def temporary_bytes(self) -> float:
        """Bytes of the shards before and after the update, of the matrices that a device gathers, and of an iteration.

        With owners, the result of an all-to-all is another array than its operand.
        """
        small, large = sorted(self.stack.shape)
        matrices = 2 * self.computed * self.size if self.layout == "owner" else self.size
        return self.width * (2 * self.local_size + matrices + 3 * small * large + 3 * small**2)


def matrices(cfg: Config) -> list[Matrices]:
    """List the stacks of matrices that Muon updates, on a device of the first stage."""
    names, layout = {*optimizer.muon_names(cfg)}, cfg.at_work.work.muon_layout
    width, steps = 2 if cfg.model.compute_dtype == "bfloat16" else 4, parse_muon(cfg.optim.muon).steps
    sizes = Counter()
    for w in (w for w in weights(cfg) if w.name in names):
        stored = replace(w, d=as_stored(w.d, cfg))
        sizes[muon.stack_of(stored.d)] += stored.local_size
    return [Matrices(stack, cfg.mesh.sizes, size, layout, steps, width) for stack, size in sizes.items()]
