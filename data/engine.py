"""Who does the work: this process, several on this machine, or a Ray cluster. What comes out is the same."""

import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection

from errors import UserError

ENGINES = ("processes", "ray")
QUEUED_PER_WORKER = 2  # tasks that wait for each worker
WAIT_S = 1.0

_shared = None  # what each task of this process needs


def run(work: Callable, shared, tasks: Iterable, workers: int, engine: str, ray_address: str) -> Iterator:
    """Yield work(shared, task) of each task, in any order; None now and then, while none is done.

    The first failure ends it: what other workers have begun is given up.
    """
    if engine == "ray":
        return _run_on_ray(work, shared, tasks, ray_address)
    return _run_in_processes(work, shared, tasks, workers) if workers > 1 else (work(shared, task) for task in tasks)


def _init_worker(shared) -> None:
    """In a new process: Ctrl-C is its parent's, and so is the end."""
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
    # Not forked: a fork copies locks that threads of this process hold.
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
        raise UserError("a worker was ended from outside, perhaps for want of memory: use fewer --workers; the same "
                        "command goes on from what is done") from error  # fmt: skip
    finally:
        for process in list((pool._processes or {}).values()):  # one may be in the middle of a large document
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _run_on_ray(work: Callable, shared, tasks: Iterable, address: str) -> Iterator:
    """The same as tasks of a Ray cluster. Ray gives those of a node that is lost to another."""
    try:
        import ray  # an extra
    except ImportError as error:
        raise UserError("--engine ray needs the package ray: make extra-ray") from error
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
        except (ConnectionError, ValueError) as error:
            raise UserError(f"--ray_address {address}: {error}") from error
    remote = ray.remote(max_retries=-1)(work)
    held, tasks, waiting = ray.put(shared), iter(tasks), []
    while True:
        most = QUEUED_PER_WORKER * max(
            int(ray.cluster_resources().get("CPU", 1)), 1
        )  # as it is now: machines come and go
        waiting += [remote.remote(held, task) for task in itertools.islice(tasks, max(most - len(waiting), 0))]
        if not waiting:
            return
        done, waiting = ray.wait(waiting, timeout=WAIT_S)
        try:
            yield from [ray.get(one) for one in done] or [None]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | OSError):
                raise error.cause from error
            raise
