"""Find the steps in a directory of checkpoints, write their manifests, and verify the steps against the manifests."""

import datetime
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from etils import epath

from config.fields import is_remote
from train import storage
from utils import UserError

MANIFEST = "manifest.json"
KEEP = "keep"  # an empty file in the directory of a step that a run never deletes
REST = os.path.join("state", "rest", "")  # not needed to read only the parameters
Read = Literal["all", "params", "none"]  # which files to verify by checksum; all others only by size
SAVING, DELETING = ".saving", ".deleting"  # suffixes of directories that are not complete checkpoints


@dataclass(frozen=True)
class StepDirectory:
    """A step's directory, or the leftover of an interrupted save or deletion."""

    path: str
    step: int
    is_complete: bool  # its name is a number; False: a leftover

    def manifest(self) -> dict:
        """Read the manifest. Raises: OSError or ValueError if it is missing or damaged."""
        manifest = json.loads(epath.Path(self.path, MANIFEST).read_text())
        if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
            raise ValueError("the contents do not match the file's sha256")
        return manifest

    @property
    def is_kept(self) -> bool:
        """Whether this step has the file KEEP."""
        return epath.Path(self.path, KEEP).exists()

    def find_fault(self, read: Read = "all") -> str | None:
        """Describe why this is not a good checkpoint, or return None. `read`: which checksums to verify."""
        if not self.is_complete:
            return "left over from an interrupted save or deletion"
        try:
            if not (there := storage.file_sizes(self.path)):
                return "the directory is empty"
            manifest = self.manifest()
        except FileNotFoundError:
            return f"it has no {MANIFEST}"
        except (OSError, ValueError) as error:
            return f"its {MANIFEST} cannot be read: {error}"
        if manifest["step"] != self.step:
            return f"its {MANIFEST} is the one of step {manifest['step']}: rename the directory to that step"
        for name, want in manifest["files"].items():
            if name not in there:
                return f"{name} is missing"
            size, mark = there[name]
            if size != want["bytes"]:
                truncated = "truncated: " if size < want["bytes"] else ""
                return f"{name} is {truncated}{size} bytes, but {want['bytes']} in the manifest"
            kind = "md5" if "md5" in want else "sha256"
            try:
                wanted = read == "all" or (read == "params" and not name.startswith(REST))
                if wanted and _checksum(kind, os.path.join(self.path, name), size, mark) != want[kind]:
                    return f"{name} is damaged: its {kind} differs from the manifest's"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror or error}"
        return None


@functools.lru_cache(maxsize=4096)  # start-up looks up the latest step three times
def _checksum(kind: str, path: str, size: int, mark: str) -> str:
    """Compute the checksum of a file; its size and mark are part of the cache key."""
    if kind == "md5" and is_remote(path) and mark:
        return mark
    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def _digest(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def list_steps(directory: str | os.PathLike) -> list[StepDirectory]:
    """List all steps in a directory, and leftovers of steps, latest first. Other files are ignored."""
    directory, entries = epath.Path(storage.absolute_path(directory)), []
    for name in (one.name for one in directory.iterdir()) if directory.is_dir() else ():
        step, _, rest = name.partition(".")
        if step.isdecimal() and (not rest or "." + rest in (SAVING, DELETING) or "orbax-checkpoint-tmp" in rest):
            path = directory / name
            whole = not rest and (not is_remote(str(path)) or (path / MANIFEST).exists())
            entries.append(StepDirectory(str(path), int(step), whole))
    return sorted(entries, key=lambda entry: (entry.step, entry.is_complete), reverse=True)


def latest_step(
    directory: str | os.PathLike, say: Callable[[str], None] | None = None, read: Read = "all"
) -> int | None:
    """Return the latest step that matches its manifest; None if there are no steps at all.

    say   called with a message for each later step or leftover that is skipped
    Raises: UserError that lists each step's fault if there are steps but none is good.
    """
    faults = []
    for entry in list_steps(directory):
        if (fault := entry.find_fault(read)) is None:
            return entry.step
        if entry.is_complete and not epath.Path(entry.path).is_dir():
            continue  # it was deleted in the meantime
        faults.append((entry, f"{entry.path}: {fault}"))
        if say:
            say(f"skipped    {faults[-1][1]}")
    if not any(entry.is_complete for entry, _ in faults):
        return None
    raise UserError(
        f"no checkpoint in {directory} can be used: " + "; ".join(fault for entry, fault in faults if entry.is_complete)
        + "; to start at step 0, move them to another directory or use --run.restart scratch")  # fmt: skip


def write_manifest(path: str, step: int, loss: float | None) -> None:
    """Write a step's manifest, which lists every file in its directory with size and checksum."""
    files, kind = {}, "md5" if is_remote(path) else "sha256"
    for name, (size, mark) in storage.file_sizes(path).items():
        if name == KEEP:  # it may come and go
            continue
        files[name] = {"bytes": size, kind: _checksum(kind, os.path.join(path, name), size, mark)}
    saved = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    loss = loss if loss is not None and math.isfinite(loss) else None
    manifest = {"step": step, "saved": saved, "loss": loss, "files": files}
    with epath.Path(path, MANIFEST).open("w") as file:
        file.write(json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
        if kind == "sha256":
            file.flush()
            os.fsync(file.fileno())
