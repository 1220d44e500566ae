import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest

from tests import extras
from tests.generate.conftest import rule, run_directory  # noqa: F401

if extras.installed("serve"):  # otherwise every test module here is skipped
    import openai
    import uvicorn

    from serve import lifetime, worker
    from serve.__main__ import open_socket
    from serve.app import Access, Server
    from serve.metrics import Metrics
    from serve.protocol import ServedModel

SLOTS, CONTEXT, PIECE = 3, 24, 8


@pytest.fixture(scope="session")
def engine(rule):  # noqa: F811
    """An engine that is compiled once and shared by the servers of the tests, one at a time."""
    engine = rule.engine(SLOTS, CONTEXT, PIECE)
    worker.compile(rule, engine)
    return engine


@contextlib.contextmanager
def serving(sampler, engine, waiting=64, timeout_s=600, **access):
    """Run a server in a thread, and yield it with a client and the internals that tests inspect."""
    here, ready = SimpleNamespace(engine=engine), threading.Event()

    async def run(listener):
        metrics = Metrics()
        here.worker = worker.Worker(engine, waiting, metrics)
        served = ServedModel("rule", sampler.encoding, engine.context)
        here.server = Server(served, here.worker, metrics, Access(**access), timeout_s)
        here.http = uvicorn.Server(lifetime.uvicorn_config(here.server, timeout_graceful_shutdown=1))
        ready.set()
        await here.http.serve(sockets=[listener])
        here.worker.stop()

    with open_socket("127.0.0.1", 0) as listener:
        here.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(run(listener)), daemon=True)
        thread.start()
        ready.wait()
        here.client = openai.OpenAI(base_url=f"{here.url}/v1", api_key=access.get("api_key", "any"), max_retries=0)
        try:
            with here.client:
                yield here
        finally:
            here.http.should_exit = True
            thread.join(60)
    for job in engine.slots:
        assert job is None or job.ended, "a finished server left a text in a slot"


@pytest.fixture(scope="module")
def server(rule, engine):  # noqa: F811
    with serving(rule, engine) as here:
        yield here


@pytest.fixture
def gate(engine, monkeypatch):
    """An event that holds the engine's steps back until it is set."""
    step, opened = engine.step, threading.Event()
    monkeypatch.setattr(engine, "step", lambda: opened.wait(60) and step())
    yield opened
    opened.set()


@pytest.fixture
def serve(rule, engine):  # noqa: F811
    """Start a separate server for a test: with serve(waiting=2) as server."""
    return lambda **settings: serving(rule, engine, **settings)
