"""The thread that runs the engine, and the texts that clients wait for.

All clients are served by one asyncio loop, and the engine runs in one thread. They share a queue of submitted jobs and
`Job.ended`, which either side may set. The engine thread returns new tokens with `call_soon_threadsafe`, once per step.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import numpy as np

from generate.engine import Engine, Token
from generate.request import Request
from generate.texts import Sampler, TextJob
from serve.metrics import Metrics


class TextUpdate(NamedTuple):
    """What one step added to a text, and the reason if the text ended."""

    index: int  # index of the text within its request
    piece: str
    tokens: list[Token]
    ended: str  # reason, as in Job.ended, or "timeout", or "error: .." if the engine failed; "": not ended


class ServedText(TextJob):
    """A text that a client waits for. `last_token_s`: time of its last token, or of its arrival if it has none yet."""

    last_token_s = 0.0


class QueueFull(Exception):
    """The number of running and waiting texts has reached its limit."""


class TextStream:
    """The texts of one request: an async iterator over their updates. `end` ends the unfinished texts."""

    def __init__(self, worker: "Worker", jobs: list[ServedText]):
        self.worker, self.jobs = worker, jobs
        self.unfinished = dict(enumerate(jobs))
        self.updates: asyncio.Queue[TextUpdate] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[TextUpdate]:
        while self.unfinished or not self.updates.empty():
            yield await self.updates.get()

    def add(self, news: TextUpdate) -> None:
        if news.index in self.unfinished:
            self.updates.put_nowait(news)
            if news.ended:
                del self.worker.streams[self.unfinished.pop(news.index)]

    def end(self, why: str) -> None:
        """End the unfinished texts for the given reason; their slots are free at the engine's next step."""
        for index, job in [*self.unfinished.items()]:
            self.worker.engine.cancel(job)
            self.add(TextUpdate(index, "", [], why))


class Worker:
    """Run an engine in a thread while there is work.

    max_texts   limit on running and waiting texts; `begin` raises QueueFull above it
    on_failure  called if the engine fails; after that no request is answered
    """

    def __init__(self, engine: Engine, waiting: int, metrics: Metrics):
        self.engine, self.metrics, self.failure = engine, metrics, ""
        self.on_failure: Callable[[], None] = lambda: None
        self.max_texts = len(engine.slots) + waiting
        self.submitted: queue.SimpleQueue[ServedText | None] = queue.SimpleQueue()
        self.streams: dict[ServedText, tuple[TextStream, int]] = {}  # of every unfinished text
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    # Methods that run in the loop's thread

    @property
    def running(self) -> int:
        return min(self.engine.running, len(self.streams))

    @property
    def waiting(self) -> int:
        return len(self.streams) - self.running

    def begin(self, jobs: list[ServedText]) -> TextStream:
        """Queue the texts of one request. Raises: QueueFull if there is no room for all of them."""
        if len(self.streams) + len(jobs) > self.max_texts:
            raise QueueFull
        answer = TextStream(self, jobs)
        for index, job in enumerate(jobs):
            self.streams[job] = answer, index
            self.metrics.prompt_tokens.inc(len(job.prompt))
            job.last_token_s = time.perf_counter()
            self.submitted.put(job)
        return answer

    def deliver(self, drawn: list[tuple[ServedText, str, Token | None, str]]) -> None:
        """Pass the tokens of one step to the streams that wait for them."""
        for job, piece, token, ended in drawn:
            if job in self.streams:
                answer, index = self.streams[job]
                answer.add(TextUpdate(index, piece, [token] if token else [], ended))

    def fail(self, why: str) -> None:
        self.failure = why
        for answer, _ in [*self.streams.values()]:
            answer.end(why)
        self.on_failure()

    def stop(self) -> bool:
        """End the thread after the engine's current step. Returns: False if the engine had failed."""
        self.submitted.put(None)
        self.thread.join()
        return not self.failure

    # Methods that run in the engine's thread

    def run(self) -> None:
        try:
            while self.admit_new():
                self.step()
        except Exception as error:  # XLA raises many types, and waiting clients must be told
            self.loop.call_soon_threadsafe(self.fail, f"error: {type(error).__name__}: {error}")

    def admit_new(self) -> bool:
        """Submit new texts to the engine, and block for one if it is idle. Returns: False to stop the thread."""
        while self.engine.idle or not self.submitted.empty():
            if (job := self.submitted.get()) is None:
                return False
            if not job.ended:
                self.engine.submit(job)
        return True

    def step(self) -> None:
        before = {job: len(job.tokens) for job in self.engine.slots if job is not None}
        jobs = self.engine.step()
        now_s, drawn = time.perf_counter(), []
        for job in jobs:
            measure = self.metrics.first_token if len(job.tokens) <= 1 else self.metrics.token
            measure.observe(now_s - job.last_token_s)
            job.last_token_s = now_s
            token = job.tokens[-1] if len(job.tokens) > before.get(job, 0) else None  # None at end of text
            drawn.append((job, job.piece, token, job.ended))
        self.metrics.drawn_tokens.inc(len(drawn))
        if drawn:
            self.loop.call_soon_threadsafe(self.deliver, drawn)


def compile(sampler: Sampler, engine: Engine) -> None:
    """Compile every function of an engine by running short texts through it."""
    end = sampler.encoding.eot_token
    for penalty in (1.0, 2.0):
        request = Request(tokens=2, repetition_penalty=penalty)
        engine.submit(TextJob(sampler.encoding, request, [end], engine.context))
        while not engine.idle:
            engine.step()
    same_row = np.zeros(engine.groups, np.int32)
    engine.cache = engine.copy(engine.cache, same_row, same_row)
