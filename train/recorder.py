"""Record a few steps of a run with jax.profiler, for `python -m train.profile`.

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

from devices import log


class Recorder:
    """Starts and stops the profiler. `program`: the compiled step; `topology`: its devices, such as v5e:4x4, or "" """

    def __init__(self, steps: tuple[int, int] | None, directory: Path, program, topology: str):
        self.first, self.last = steps or (0, 0)
        self.directory, self.program, self.topology = directory, program, topology
        self.started = self.annotation = None

    def begin(self, step: int, state) -> None:
        """Start the profiler if `step` is the first to record and has not run yet. Earlier steps finish first."""
        if not self.first <= step <= self.last:
            return
        if self.started is None:
            jax.block_until_ready(state)
            shutil.rmtree(self.directory, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python's calls would slow the host, and nothing reads them
            jax.profiler.start_trace(self.directory, profiler_options=options)
            self.first, self.started = step, time.perf_counter()
        self.annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self.annotation.__enter__()

    def end(self, step: int, state) -> None:
        """Stop the profiler if `step` was the last to record, and write the program beside the trace."""
        if self.annotation is None:
            return
        self.annotation.__exit__(None, None, None)
        self.annotation = None
        if step == self.last:
            jax.block_until_ready(state)
            seconds = time.perf_counter() - self.started
            jax.profiler.stop_trace()
            about = dict(first=self.first, last=step, seconds=seconds, devices=jax.local_device_count(),
                         topology=self.topology)  # fmt: skip
            (self.directory / "steps.json").write_text(json.dumps(about))
            (self.directory / "step.hlo.gz").write_bytes(gzip.compress(self.program.as_text().encode()))
            log(f"profile    steps {self.first} to {step} in {self.directory}; see python -m train.profile")
