"""Measure which tests `make test` leaves out because they take long: `make test-long` runs them.

    make test-all ARGS=--durations=0 > LOG
    python -m tests.seconds LOG    # reads one log or more, and writes tests/seconds.json

The file has the seconds of each test function that takes longer than LONG_S, summed over its cases. They were measured
on one core of a machine that does other work, so only their size matters. `make test` leaves out the functions of this
file, except those in KEPT, and the cases that a test marks `long` itself. A new test is not in the file: `make test`
runs it.
"""

import collections
import functools
import json
import re
import sys
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
LONG_S = 5.0
# What `make test` keeps although it takes long: what it protects is worth the time.
KEPT = (
    "tests/test_parity.py::test_a_mesh_equals_one_device",  # on the meshes that cover each pair of axes
    "tests/test_training.py::test_a_killed_run_resumes",
    "tests/test_command_line.py::test_help_begins_with_an_example",  # of each command
    "tests/test_local_steps.py::test_a_run_resumes_in_the_middle_of_a_round",
)


def read(logs: list[str]) -> dict[str, float]:
    """Return the seconds of each test function in the logs of pytest, with the preparations of its fixtures."""
    longest = {}
    for log in logs:
        found = collections.Counter()
        for line in Path(log).read_text(encoding="utf-8", errors="replace").splitlines():
            if match := re.match(r"([\d.]+)s (?:call|setup) +(\S+?::\w+)", line):
                found[match[2]] += float(match[1])
        longest |= {name: max(seconds, longest.get(name, 0)) for name, seconds in found.items()}
    return longest


def is_long(node_id: str) -> bool:
    """Whether `make test` leaves out a test because its function takes long."""
    function = node_id.split("[")[0]
    return function in measured() and function not in KEPT


@functools.cache
def measured() -> dict[str, float]:
    return json.loads(FILE.read_text())


def main(logs: list[str]) -> int:
    if not logs or not all(Path(log).is_file() for log in logs):
        print("error: pass the logs of `make test-all ARGS=--durations=0`", file=sys.stderr)
        return 2
    long = {name: round(seconds, 1) for name, seconds in sorted(read(logs).items()) if seconds > LONG_S}
    FILE.write_text(json.dumps(long, indent=1) + "\n")
    print(f"{FILE.name}: {len(long)} functions take longer than {LONG_S:g} s, {sum(long.values()):,.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
