"""Run one of the three command-line scripts: launcher, setup_tpu or debug_tpu."""

import os
import sys

from launch import launcher, panes
from launch.hosts import run_script


def main() -> int:
    work, text = {
        "launcher": (launcher.run, launcher.__doc__),
        "setup_tpu": (launcher.setup, launcher.SETUP),
        "debug_tpu": (panes.run, panes.__doc__),
    }[os.environ.pop("AXIS_SCRIPT", "launcher")]
    return run_script(work, sys.argv[1:], text)
