"""Start the server, and drain it when a signal arrives."""

import asyncio
import contextlib
import os
import signal
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from generate.engine import Engine
from serve.app import Access, Server
from serve.metrics import Metrics
from serve.protocol import ServedModel
from serve.worker import Worker

HEADER_SECONDS = 30  # for the whole header of a request
READ_SECONDS = 60  # for the next part of a response, about 48 KiB, once all buffers are full


class Protocol(H11Protocol):
    """Close a connection if its next request has no whole header for HEADER_SECONDS, or if its client does not read."""

    timer: asyncio.TimerHandle | None = None
    unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.set_timer()

    def handle_events(self) -> None:  # called after each arrival of data, and after each complete response
        super().handle_events()
        self.set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in filter(None, (self.timer, self.unread)):
            timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.cancel()

    def set_timer(self) -> None:
        """Start the timer when a header may begin, and stop it when the header is complete."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.timer:
            self.timer.cancel()
            self.timer = None
        elif not answering and not self.timer:
            self.timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)


class Uvicorn(uvicorn.Server):
    capture_signals = contextlib.nullcontext  # `run` handles signals itself


def uvicorn_config(server: Server, **more) -> uvicorn.Config:
    return uvicorn.Config(server.app, http=Protocol, log_level="warning", access_log=False, **more)


async def run(
    listener: socket.socket,
    served: ServedModel,
    engine: Engine,
    waiting: int,
    access: Access,
    timeout_s: float = 600,
) -> int:
    """Serve requests until SIGTERM or SIGINT, then finish those in progress. A second signal ends the process at once.

    Returns: the exit status, 1 if the engine failed.
    """
    metrics, loop = Metrics(), asyncio.get_running_loop()
    worker = Worker(engine, waiting, metrics)
    server = Server(served, worker, metrics, access, timeout_s)
    # A slow client may keep reading for 5 s after all texts are finished.
    http = Uvicorn(uvicorn_config(server, timeout_graceful_shutdown=5))

    async def end() -> None:
        while worker.streams:
            await asyncio.sleep(0.05)
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
