"""Follow a run as it trains: evaluate every checkpoint once, until the run is complete.

RUN/evaluations/STEP-KEY.json has the results of a checkpoint. KEY is a hash of the checkpoint and of the command's
arguments, so an interrupted command continues where it stopped, and another command evaluates all checkpoints.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator

from etils import epath

from config import Config
from generate.runs import digest
from progress import print_to_stderr
from train.directory import EVALUATIONS, SAVED, to_json
from train.steps import StepDirectory, list_steps
from utils import UserError
from weights import convert

POLL_S = 10.0


def follow(run: str, of: dict, evaluate: Callable[[int], dict]) -> Iterator[dict]:
    """Yield evaluate(step) for each checkpoint of a run that has no result yet, as soon as it is saved.

    of   the arguments that results depend on
    Raises: UserError if the directory is not the one of a run, and what `evaluate` raises for a good checkpoint.
    """
    skipped, waits = set(), None
    while True:
        saved, steps = progress_of(run)
        entries = [one for one in reversed(list_steps(f"{run}/checkpoints")) if one.is_complete and one.step <= saved]
        for entry in entries:
            try:
                file = result_file(run, of, entry.step)
                if entry.step in skipped or file.exists():
                    continue
                result = evaluate(entry.step)
            except Exception:
                if (fault := find_fault(entry)) is None:
                    raise
                skipped.add(entry.step)
                print_to_stderr(f"skipped    step {entry.step}: {fault}")
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"arguments": of, **to_json(result)}, indent=1) + "\n")
            yield result
            break  # the run may have saved or deleted checkpoints in the meantime
        else:
            if saved >= steps:
                return
            if waits != (waits := saved):
                print_to_stderr(f"waiting    for a checkpoint of {run} after step {saved} of {steps}")
            time.sleep(POLL_S)


def progress_of(run: str) -> tuple[int, int]:
    """Return the step of a run's latest checkpoint, 0 without one, and the number of its steps."""
    steps = Config.from_dict(convert.read_about(run)["config"]).run.steps
    if convert.has_weights_only(run):
        raise UserError(f"{run} has exported weights but no checkpoints to follow; omit --follow")
    file = epath.Path(run, SAVED)
    try:
        return (int(file.read_text()) if file.exists() else 0), steps
    except ValueError:
        raise UserError(f"{file} should have the step of the latest checkpoint; write this number into it") from None


def result_file(run: str, of: dict, step: int) -> epath.Path:
    """Return the file with the results of a checkpoint. Its name changes with the checkpoint and the arguments."""
    key = hashlib.sha256(json.dumps([of, digest(run, {}, step)], sort_keys=True).encode()).hexdigest()
    return epath.Path(run, EVALUATIONS, f"{step}-{key[:12]}.json")


def find_fault(entry: StepDirectory) -> str | None:
    """Describe why a checkpoint could not be evaluated: the run has deleted it, or it is damaged. None: neither."""
    return entry.find_fault("params") if epath.Path(entry.path).is_dir() else "the run has deleted it"
