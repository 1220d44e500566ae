"""Start the server, and drain it when a signal arrives."""

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
    capture_signals = contextlib.nullcontext  # `run` handles signals itself


async def run(
    listener: socket.socket,
    served: ServedModel,
    engine: Engine,
    waiting: int,
    api_key: str = "",
    timeout_s: float = 600,
) -> int:
    """Serve requests until SIGTERM or SIGINT, then finish those in progress. A second signal ends the process at once.

    Returns: the exit status, 1 if the engine failed.
    """
    metrics, loop = Metrics(), asyncio.get_running_loop()
    worker = Worker(engine, waiting, metrics)
    server = Server(served, worker, metrics, api_key, timeout_s)
    # A slow client may keep reading for 5 s after all texts are finished.
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
            os._exit(128 + number)  # a normal exit would wait for the engine's current step
        drain()

    worker.on_failure = drain
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    address, port, *_ = listener.getsockname()
    print(f"ready      http://{f'[{address}]' if ':' in address else address}:{port} serves {served.model}", flush=True)
    await http.serve(sockets=[listener])
    return 0 if worker.stop() else 1
