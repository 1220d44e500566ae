"""The thread that runs the engine, and the texts that clients wait for.

Clients live in one asyncio loop, the engine in one thread. They share two things: a queue of jobs to begin, and
`Job.ended`, which either may set; what is drawn comes back by `call_soon_threadsafe`, once a step.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import numpy as np

from generate.engine import Engine, Token
from generate.sampling import Request
from generate.texts import Sampler, Writing
from serve.metrics import Metrics


class News(NamedTuple):
    """What one step added to a text, and why it ended, if it did."""

    index: int  # of the text among those of its request
    piece: str
    tokens: list[Token]
    ended: str  # as Job.ended; also "timeout", or "error: .." if the engine failed


class Text(Writing):
    """A text that a client waits for. told_s: when its last token was drawn; before the first, when it arrived."""

    told_s = 0.0


class Full(Exception):
    """More texts wait than may."""


class Answer:
    """The texts of one request, as they grow. Leave it, and those that are not done are cancelled."""

    def __init__(self, worker: "Worker", jobs: list[Text]):
        self.worker, self.jobs = worker, jobs
        self.left = dict(enumerate(jobs))
        self.news: asyncio.Queue[News] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[News]:
        while self.left or not self.news.empty():
            yield await self.news.get()

    def add(self, news: News) -> None:
        if news.index in self.left:
            self.news.put_nowait(news)
            if news.ended:
                self.worker.forget(self.left.pop(news.index))

    def end(self, why: str) -> None:
        """End the texts that are not done; their slots are free at the engine's next step."""
        for index, job in [*self.left.items()]:
            self.worker.engine.cancel(job)
            self.add(News(index, "", [], why))


class Worker:
    """An engine that runs while there is work.

    most    texts that are running or waiting at a time; beyond them `begin` refuses
    failed  called if the engine fails, after which nothing is answered any more
    """

    def __init__(self, engine: Engine, waiting: int, metrics: Metrics):
        self.engine, self.metrics, self.broken = engine, metrics, ""
        self.failed: Callable[[], None] = lambda: None
        self.most = len(engine.slots) + waiting
        self.new: queue.SimpleQueue[Text | None] = queue.SimpleQueue()
        self.places: dict[Text, tuple[Answer, int]] = {}  # of every text that is not done
        self.changed = asyncio.Event()  # a text is done
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    # In the loop's thread

    @property
    def running(self) -> int:
        return min(self.engine.running, len(self.places))

    @property
    def waiting(self) -> int:
        return len(self.places) - self.running

    def begin(self, jobs: list[Text]) -> Answer:
        """Raises: Full."""
        if len(self.places) + len(jobs) > self.most:
            raise Full
        answer = Answer(self, jobs)
        for index, job in enumerate(jobs):
            self.places[job] = answer, index
            self.metrics.prompt_tokens.inc(len(job.prompt))
            job.told_s = time.perf_counter()
            self.new.put(job)
        return answer

    def forget(self, job: Text) -> None:
        del self.places[job]
        self.changed.set()

    def tell(self, drawn: list[tuple[Text, str, Token | None, str]]) -> None:
        """Bring what a step has drawn to those who wait for it."""
        for job, piece, token, ended in drawn:
            if job in self.places:
                answer, index = self.places[job]
                answer.add(News(index, piece, [token] if token else [], ended))

    def fail(self, why: str) -> None:
        self.broken = why
        for answer, _ in [*self.places.values()]:
            answer.end(why)
        self.failed()

    async def finished(self) -> None:
        """Wait until no text is left."""
        while self.places:
            self.changed.clear()
            await self.changed.wait()

    def stop(self) -> bool:
        """End the thread, at the engine's next step. False: the engine had failed."""
        self.new.put(None)
        self.thread.join()
        return not self.broken

    # In the engine's thread

    def run(self) -> None:
        try:
            while self.take_in():
                self.step()
        except Exception as error:  # whatever XLA raises: who waits must hear of it
            self.loop.call_soon_threadsafe(self.fail, f"error: {type(error).__name__}: {error}")

    def take_in(self) -> bool:
        """Hand new texts to the engine; wait for one if there is nothing to do. False: stop."""
        while self.engine.idle or not self.new.empty():
            if (job := self.new.get()) is None:
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
            measure.observe(now_s - job.told_s)
            job.told_s = now_s
            token = job.tokens[-1] if len(job.tokens) > before.get(job, 0) else None  # end of text is not added
            drawn.append((job, job.piece, token, job.ended))
        self.metrics.drawn_tokens.inc(len(drawn))
        if drawn:
            self.loop.call_soon_threadsafe(self.tell, drawn)


def compile(sampler: Sampler, engine: Engine) -> None:
    """Run a text through an engine, and with it each function it has."""
    end = sampler.encoding.eot_token
    for penalty in (1.0, 2.0):
        request = Request(tokens=2, repetition_penalty=penalty)
        engine.submit(Writing(sampler.encoding, request, [end], engine.context))
        while not engine.idle:
            engine.step()
    same_row = np.zeros(engine.groups, np.int32)
    engine.cache = engine.copy(engine.cache, same_row, same_row)
