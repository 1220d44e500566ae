"""Record a few steps of a run with jax.profiler, for `python -m plan.profile`.

RUN/profile/process-00/  steps.json   the recorded steps, their seconds, the number of devices, and their topology
                         step.hlo.gz  the text of the compiled step
                         plugins/profile/TIME/HOST.xplane.pb and HOST.trace.json.gz  the trace

Every process has a folder, on the disk of its host. Outside the recorded steps, the profiler is off, and the training
loop only compares two numbers.
"""

import gzip
import json
import shutil
import time
from pathlib import Path

import jax

from utils import log


class Recorder:
    """Calls the compiled step, and runs the profiler during the steps to record."""

    def __init__(self, program, steps: tuple[int, int] | None, taken: int, directory: Path, topology=None):
        """program: the compiled step. taken: steps before the first call. topology: a `hardware.Topology`, if known"""
        self.first, self.last = steps or (0, 0)
        self.program, self.taken, self.directory, self.topology = program, taken, directory, str(topology or "")
        self.started = None

    def __call__(self, state, batch):
        self.taken += 1
        if not self.first <= self.taken <= self.last:
            return self.program(state, batch)
        if self.started is None:
            self.start(state)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.taken):
            state, values = self.program(state, batch)
        if self.taken == self.last:
            self.stop(state)
        return state, values

    def start(self, state) -> None:
        """Start the profiler, after all earlier steps."""
        jax.block_until_ready(state)
        shutil.rmtree(self.directory, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's calls would slow the host, and nothing reads them
        jax.profiler.start_trace(self.directory, profiler_options=options)
        self.first, self.started = self.taken, time.perf_counter()

    def stop(self, state) -> None:
        """Stop the profiler, after the recorded steps, and write the program beside the trace."""
        jax.block_until_ready(state)
        seconds = time.perf_counter() - self.started
        jax.profiler.stop_trace()
        about = dict(first=self.first, last=self.taken, seconds=seconds, devices=jax.local_device_count(),
                     topology=self.topology)  # fmt: skip
        (self.directory / "steps.json").write_text(json.dumps(about))
        (self.directory / "step.hlo.gz").write_bytes(gzip.compress(self.program.as_text().encode()))
        log(f"profile    steps {self.first} to {self.taken} in {self.directory}; see python -m plan.profile")
