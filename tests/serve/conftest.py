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

    from serve import worker
    from serve.__main__ import open_socket
    from serve.app import Server
    from serve.metrics import Metrics
    from serve.protocol import ServedModel

SLOTS, CONTEXT, PIECE = 3, 24, 8


@pytest.fixture(scope="session")
def engine(rule):  # noqa: F811
    """Compiled once; a server at a time may have it."""
    engine = rule.engine(SLOTS, CONTEXT, PIECE)
    worker.compile(rule, engine)
    return engine


@contextlib.contextmanager
def serving(sampler, engine, waiting=64, **settings):
    """A server in a thread of this process, with a client of it, and what a test looks into."""
    here, ready = SimpleNamespace(engine=engine), threading.Event()

    async def run(knock):
        metrics = Metrics()
        here.worker = worker.Worker(engine, waiting, metrics)
        here.server = Server(ServedModel("rule", sampler.encoding, engine.context), here.worker, metrics, **settings)
        here.http = uvicorn.Server(uvicorn.Config(here.server.app, log_level="warning", timeout_graceful_shutdown=1))
        ready.set()
        await here.http.serve(sockets=[knock])
        here.worker.stop()

    with open_socket("127.0.0.1", 0) as knock:
        here.url = f"http://127.0.0.1:{knock.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(run(knock)), daemon=True)
        thread.start()
        ready.wait()
        here.client = openai.OpenAI(base_url=f"{here.url}/v1", api_key=settings.get("api_key", "any"), max_retries=0)
        try:
            with here.client:
                yield here
        finally:
            here.http.should_exit = True
            thread.join(60)
    for job in engine.slots:
        assert job is None or job.ended, "a slot is held by nobody"


@pytest.fixture(scope="module")
def server(rule, engine):  # noqa: F811
    with serving(rule, engine) as here:
        yield here


@pytest.fixture
def gate(engine, monkeypatch):
    """The engine steps while the gate is open."""
    step, opened = engine.step, threading.Event()
    monkeypatch.setattr(engine, "step", lambda: opened.wait(60) and step())
    yield opened
    opened.set()


@pytest.fixture
def serve(rule, engine):  # noqa: F811
    """A server of a test's own: with serve(waiting=2) as server."""
    return lambda **settings: serving(rule, engine, **settings)
