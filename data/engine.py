"""Run tasks in this process, in several processes on this machine, or on a Ray cluster, with the same results."""

import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection

from utils import UserError

QUEUED_PER_WORKER = 2  # tasks in the queue of each worker
WAIT_S = 1.0

_shared = None  # in a worker: the first argument of every task


def run(work: Callable, shared, tasks: Iterable, workers: int, engine: str, ray_address: str) -> Iterator:
    """Yield work(shared, task) for each task, in any order. While no task finishes, yield None about once a second.

    The first failure stops everything, including tasks that other workers have started.
    """
    if engine == "ray":
        return _run_on_ray(work, shared, tasks, ray_address)
    return _run_in_processes(work, shared, tasks, workers) if workers > 1 else (work(shared, task) for task in tasks)


def _init_worker(shared) -> None:
    """Set up a worker process: it ignores Ctrl-C, and exits when its parent does."""
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow():
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _call(work: Callable, task):
    return work(_shared, task)


def _run_in_processes(work: Callable, shared, tasks: Iterable, workers: int) -> Iterator:
    # Spawn, because a fork copies locks that threads of this process hold.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_init_worker, initargs=(shared,)
    )
    tasks, waiting = iter(tasks), set()
    try:
        while True:
            for task in itertools.islice(tasks, workers * QUEUED_PER_WORKER - len(waiting)):
                waiting.add(pool.submit(_call, work, task))
            if not waiting:
                return
            done, waiting = concurrent.futures.wait(waiting, WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED)
            yield from [one.result() for one in done] or [None]
    except concurrent.futures.process.BrokenProcessPool as error:
        raise UserError("a worker process was killed, perhaps because memory ran out; run the same command with fewer "
                        "--workers to resume; finished work is kept") from error  # fmt: skip
    finally:
        for process in list((pool._processes or {}).values()):  # a worker may be tokenizing a large document
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _run_on_ray(work: Callable, shared, tasks: Iterable, address: str) -> Iterator:
    """Run the tasks on a Ray cluster. If a node is lost, Ray runs its tasks on another one."""
    try:
        import ray  # an extra
    except ImportError as error:
        raise UserError("--engine ray needs the package ray; install it with: make extra-ray") from error
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
        except (ConnectionError, ValueError) as error:
            raise UserError(f"--ray_address {address}: {error}") from error
    remote = ray.remote(max_retries=-1)(work)
    shared, tasks, waiting = ray.put(shared), iter(tasks), []
    while True:
        most = QUEUED_PER_WORKER * max(
            int(ray.cluster_resources().get("CPU", 1)), 1
        )  # counted every time, because nodes join and leave
        waiting += [remote.remote(shared, task) for task in itertools.islice(tasks, max(most - len(waiting), 0))]
        if not waiting:
            return
        done, waiting = ray.wait(waiting, timeout=WAIT_S)
        try:
            yield from [ray.get(one) for one in done] or [None]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | OSError):
                raise error.cause from error
            raise
