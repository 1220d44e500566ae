"""Processes that train together, for tests: threads that share a board, or two real processes."""

import os
import socket
import subprocess
import sys
import threading

from tests.train.small_run import ROOT

SHORT = ["--run.steps", "8", "--run.checkpoint_every", "4", "--run.eval_every", "4", "--run.peer_timeout_s", "8"]


class Ended(BaseException):
    """Raised in a test's thread in place of `exit`."""


def run_in_threads(ones, work):
    """Run work(one) for each in its own thread; return the results in order, None for one that was ended."""
    found = {}

    def call(one):
        try:
            found[one.board.rank] = work(one)
        except Ended:
            found[one.board.rank] = None

    threads = [threading.Thread(target=call, args=(one,), daemon=True) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it waits forever"
    return [found[one.board.rank] for one in ones]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def run_two_processes(*words_of_each, script="main.py", begin=lambda rank, process: None, settings=({}, {}), **how):
    """Run two processes that train together, each with its flags; return all exit statuses, outputs and errors.

    begin      called with the rank of each and its process, as soon as it is started
    settings   extra environment variables of each
    how        an argument of Popen -> its value for each
    """
    port = free_port()
    begun = []
    for rank, words in enumerate(words_of_each):
        told = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank),
                "AXIS_HOST": f"host0{rank}", "AXIS_FAULT": "kill:1:save:4"}  # fmt: skip
        command = [sys.executable, ROOT / script, *words, "--devices", "2", "--mesh", "fsdp=2"]
        told |= settings[rank]
        usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        arguments = usual | {name: of_each[rank] for name, of_each in how.items()}
        begun.append(subprocess.Popen(command, env=os.environ | told, text=True, **arguments))
        begin(rank, begun[-1])
    said = [one.communicate(timeout=480) for one in begun]
    return [one.returncode for one in begun], [out for out, _ in said], [err for _, err in said]
