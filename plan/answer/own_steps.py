"""Fit the constants of a plan to steps that the user measured: `--measured`."""

import dataclasses

from config import Config, flags
from plan.answer import planning
from plan.chips.hardware import Topology
from plan.time import fit, measured, terms
from utils import UserError

FORM = "'mesh=fsdp=8 batch=64 step=3.41' (also seq_len=4096 or work.remat=full; a semicolon separates steps)"
SHORT = {"mesh": "mesh", "batch": "data.batch_size", "seq_len": "data.seq_len"}


def read(text: str, cfg: Config) -> list[tuple[Config, float]]:
    """Parse `--measured`: for each step its settings, which are those of `cfg` if not given, and its seconds.

    Raises: UserError that shows the form.
    """
    found = []
    for one in text.split(";"):
        pairs = dict(word.partition("=")[::2] for word in one.split())
        try:
            step_s = float(pairs.pop("step", "").removesuffix("s"))
        except ValueError:
            step_s = 0.0
        if not 0 < step_s < float("inf"):
            raise UserError(f"--measured {one.strip()!r}: it has no step=SECONDS above 0; write {FORM}")
        unknown = [name for name in pairs if name not in SHORT and "." not in name]
        if unknown:
            raise UserError(f"--measured {one.strip()!r}: unknown name {unknown[0]!r}; write {FORM}")
        words = [f"--{SHORT.get(name, name)}={value}" for name, value in pairs.items()]
        found.append((flags.command_line(words, "python -m plan --measured", "", cfg)[0], step_s))
    return found


def learn(topology: Topology, text: str, cfg: Config) -> Topology:
    """Return the topology with constants that are fitted to the measured steps too.

    Raises: UserError for a step that cannot be planned on this topology.
    """
    steps = [(planning.plan(settings, topology), step_s) for settings, step_s in read(text, cfg)]
    before = measured.speeds_of(steps[0][0])  # they depend on the topology alone
    samples = [fit.Measured(terms.costs(plan, plan.simulated, before.trainer), plan.bubble, step_s)
               for plan, step_s in steps]  # fmt: skip
    return dataclasses.replace(topology, speeds=dataclasses.replace(fit.fit(before, samples), own=len(samples)))
