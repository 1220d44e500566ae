"""Fit the constants of a plan to what the user measured: `--measured`, and `--constants` with a report."""

import dataclasses

from config import Config, flags
from plan.answer import planning
from plan.chips.hardware import CHIPS, Topology
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
    before = measured.speeds_of(topology)
    samples = [sample(settings, topology, step_s, before) for settings, step_s in read(text, cfg)]
    return dataclasses.replace(topology, speeds=dataclasses.replace(fit.fit(before, samples), own=len(samples)))


def sample(cfg: Config, topology: Topology, step_s: float, before: measured.Speeds) -> fit.Measured:
    plan = planning.plan(cfg, topology)
    return fit.Measured(terms.costs(plan, plan.simulated, before.trainer), plan.bubble, step_s)


def learn_report(topology: Topology, report: dict, path: str) -> Topology:
    """Return the topology with constants that are fitted to a file of `python -m bench.report`: to its training steps,
    which ran on one device, to its matmuls and to its attention. All rows of an operation together count as one step.

    Raises: UserError if the report is of another chip, or of settings that this version does not have.
    """
    chip, refuse = topology.chip, lambda why: UserError(f"--constants {path}: {why}")
    if report.get("device") != chip.device_kind:
        of = next((one.key for one in CHIPS.values() if one.device_kind == report.get("device")), "such devices")
        raise refuse(f"it was measured on {report.get('device')!r}, and {topology} has {chip.device_kind!r}; use a "
                     f"--topology of {of}, or measure {chip.key} with python -m bench.report")  # fmt: skip
    before, samples = measured.speeds_of(topology), []
    one_device = Topology.parse(f"{chip.key}:{'x'.join('1' * max(chip.torus_dims, 1))}")
    try:
        rows = {part: [row for row in rows if row.get("plan_s")] for part, rows in report["parts"].items()}
        steps = [row for ones in rows.values() for row in ones if "config" in row]
        for row in steps:
            samples.append(sample(Config.from_dict(row["config"]), one_device, row["seconds"], before))
        for term, wanted in (("matmuls", ""), ("attention", "backward")):
            ones = [row for row in rows.get(term.removesuffix("s"), ()) if wanted in row["name"]]
            for row in ones:
                cost = terms.Cost(term, terms.MATMULS, row["plan_s"])
                samples.append(fit.Measured([cost], 0.0, row["seconds"], 1 / len(ones)))
    except UserError as error:
        raise refuse(str(error)) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise refuse("it is not a file of python -m bench.report; write one on such a device") from error
    found = dataclasses.replace(fit.fit(before, samples), noise=before.noise, steps=before.steps + len(steps))
    return dataclasses.replace(topology, speeds=dataclasses.replace(found, own=len(steps)))
