"""The constants of a chip that fit the recorded steps of one run, in a JSON file.

`python -m plan.profile RUN --calibrate FILE` writes the file, and `python -m plan --constants FILE` multiplies what
`measured.py` plans with the constants in the file.
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from utils import UserError, suggest

HOW = "write it with python -m plan.profile RUN --calibrate FILE, or with python -m bench.report"


@dataclass(frozen=True)
class Constants:
    """How much longer the steps of a run took than planned, and the steps that this comes from."""

    chip: str  # a key of `hardware.CHIPS`
    run: str
    date: str  # of the recording
    first_step: int
    last_step: int
    step_s: float  # seconds of one recorded step
    topology: str
    mesh: str
    waits: float  # fraction of the step in which devices waited longer than planned; below 0: shorter
    matmuls: float  # matmuls take this fraction of their planned time longer
    others: float  # other operations take this fraction of their planned time longer

    def __str__(self) -> str:
        return f"steps {self.first_step} to {self.last_step} of {self.run}, {self.date}, {self.mesh} on {self.topology}"

    def values(self) -> str:
        """Return the constants as text."""
        return (f"matmuls take {self.matmuls:+.1%}, other operations take {self.others:+.1%}, devices wait "
                f"{self.waits:+.1%} of the step longer than planned")  # fmt: skip


def write(found: Constants, path: str) -> None:
    Path(path).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def load(path: str) -> dict:
    """Read a file of `--constants`. Raises: UserError if it has no JSON object."""
    refuse = lambda why: UserError(f"--constants {path}: {why}; {HOW}")
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(error.strerror) from error
    except ValueError as error:
        raise refuse(f"not JSON ({error})") from error
    if not isinstance(given, dict):
        raise refuse("it names no chip")
    return given


def learn(topology, given: dict, path: str):
    """Return the topology with the constants in a file. Raises: UserError if they are not valid for its chip."""
    refuse = lambda why: UserError(f"--constants {path}: {why}")
    chip = topology.chip
    types = {f.name: f.type for f in fields(Constants)}
    if "chip" not in given:
        raise refuse(f"it names no chip; {HOW}")
    if given["chip"] != chip.key:
        raise refuse(f"its constants are of {given['chip']}, and {topology} has {chip.key}; use a --topology of "
                     f"{given['chip']}, or record a run on {chip.key}")  # fmt: skip
    for name in given:
        if name not in types:
            raise refuse(f"unknown key {name!r}; {suggest(name, types)}")
    for name, kind in types.items():
        value = given.get(name)
        right = isinstance(value, str) if kind is str else type(value) in (int, float) and math.isfinite(value)
        if not right:
            what = "text" if kind is str else "a number"
            raise refuse(f"{name} should be {what}, and is {json.dumps(value)}; {HOW}")
    if given["waits"] >= 1 or any(given[name] < -1 for name in ("matmuls", "others")):
        raise refuse(f"{Constants(**given).values()}: nothing takes less than no time; {HOW}")
    return replace(topology, constants=Constants(**given))
