"""A server from its first request to its last."""

import asyncio
import contextlib
import os
import signal
import socket

import uvicorn

from generate.engine import Engine
from serve.app import Server
from serve.metrics import Metrics
from serve.protocol import ServedModel
from serve.worker import Worker


class Uvicorn(uvicorn.Server):
    capture_signals = contextlib.nullcontext  # `run` has its own


async def run(
    listener: socket.socket,
    served: ServedModel,
    engine: Engine,
    waiting: int,
    api_key: str = "",
    timeout_s: float = 600,
) -> int:
    """Answer who comes to a socket, until a signal; then finish what was begun. A second signal ends the process.

    Returns: an exit status, 1 if the engine failed.
    """
    metrics, loop = Metrics(), asyncio.get_running_loop()
    worker = Worker(engine, waiting, metrics)
    server = Server(served, worker, metrics, api_key, timeout_s)
    # A client that reads slowly may go on for 5 s after all texts are done.
    http = Uvicorn(uvicorn.Config(server.app, log_level="warning", access_log=False, timeout_graceful_shutdown=5))

    async def end() -> None:
        await worker.wait_until_done()
        http.should_exit = True

    def drain() -> None:
        if server.draining:
            return
        print(f"draining   {worker.running} texts are running and {worker.waiting} waiting", flush=True)
        server.draining = loop.create_task(end())

    def signalled(number: int) -> None:
        if server.draining:
            print(f"ended      by a second signal: {worker.running} texts were running", flush=True)
            os._exit(128 + number)  # the engine's thread may be in a step, and would be waited for
        drain()

    worker.on_failure = drain
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    address, port, *_ = listener.getsockname()
    print(f"ready      http://{f'[{address}]' if ':' in address else address}:{port} has {served.model}", flush=True)
    await http.serve(sockets=[listener])
    return 0 if worker.stop() else 1
