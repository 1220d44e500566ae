"""Assign weekly tests to weekdays: a seventh of the repeats each day, tests of large packages on fixed weekdays.

    python -m tests.rotation 3    # the targets that install what Wednesday's tests need

`make test-rotation` installs them and runs the tests of today (UTC), or of another day with DAY=3.
"""

import hashlib
import sys

NAMES = {1: "Monday", 2: "Tuesday", 3: "Wednesday", 4: "Thursday", 5: "Friday", 6: "Saturday", 7: "Sunday"}
# The day of each set of extras that a test needs. Each day installs only one set.
DAY_OF_EXTRAS = {
    ("ray",): 1,
    ("torch",): 2,
    ("sentencepiece",): 3,
    ("evaluate", "parity", "torch"): 4,
    ("parity",): 5,
    ("parity", "torch"): 6,
}
# The days of the longest repeats, by a part of their id, which spread them over the week. A hash gives all other days.
DAY_OF_LONG = {
    "python -m bench.options": 5,
    "python -m plan moe1b --topology v4:4x4x8": 3,
    "python -m plan mixtral_8x7b --topology v4:8x8x16": 2,
    "python -m bench.overlap llama3_8b --topology v4:4x4x4": 6,
    "test_twenty_kills_change_no_bit": 7,
}


def day_of(test_id: str, extras: tuple[str, ...] = ()) -> int:
    """Return the weekday (1 to 7) on which CI runs a test. It depends on neither the machine nor the other tests.

    Raises: KeyError for a set of extras without a day.
    """
    if large := tuple(name for name in extras if name != "tpu"):
        return DAY_OF_EXTRAS[large]
    for long, day in DAY_OF_LONG.items():
        if long in test_id:
            return day
    return int.from_bytes(hashlib.sha256(test_id.encode()).digest()[:8], "big") % 7 + 1


def tests_of_day(items, day: int) -> list:
    """Return the tests that `tests/conftest.py` marked for a day."""
    return [item for item in items for mark in item.iter_markers("rotation") if mark.kwargs["day"] == day]


def extras_of_day(day: int) -> list[str]:
    return [name for extras, its_day in DAY_OF_EXTRAS.items() if its_day == day for name in extras]


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in map(str, NAMES):
        print(f"error: DAY={' '.join(words)}: use a weekday from 1, Monday, to 7, Sunday", file=sys.stderr)
        return 2
    print(*(f"extra-{name}" for name in extras_of_day(int(words[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
