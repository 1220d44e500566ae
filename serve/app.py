"""What is answered at which path."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.metrics import Metrics
from serve.protocol import RequestError, ResponseBuilder, ServedModel, event
from serve.worker import QueueFull, TextStream, Worker

MAX_REQUEST_BYTES = 2**20  # of a request
PAGE = Path(__file__).parent / "page.html"


class Server:
    """A worker, and the paths at which clients reach it.

    api_key    what /v1 and /metrics ask for; empty: nothing
    timeout_s  longest that a request may take, its wait for a slot included
    draining   what runs is finished, and nothing else is begun
    """

    def __init__(
        self, served: ServedModel, worker: Worker, metrics: Metrics, api_key: str = "", timeout_s: float = 600
    ):
        self.served, self.worker, self.metrics = served, worker, metrics
        self.api_key, self.timeout_s, self.draining = api_key, timeout_s, False
        self.created = int(time.time())
        get, post = (lambda path, answer, how=how: Route(path, answer, methods=[how]) for how in ("GET", "POST"))
        app = Starlette(
            routes=[
                get("/", lambda _: HTMLResponse(PAGE.read_text().replace("MODEL", served.model))),
                get("/health", self.health),
                get("/metrics", self.prometheus),
                get("/v1/models", lambda _: JSONResponse({"object": "list", "data": [self.model()]})),
                get("/v1/models/{name}", self.one_model),
                post("/v1/completions", self.completions),
                post("/v1/chat/completions", self.completions),
            ],
            exception_handlers={RequestError: error_response, HTTPException: error_response, Exception: error_response},
        )
        self.app = count_requests(require_api_key(app, api_key), metrics, {route.path for route in app.routes})

    # About the server

    async def health(self, _) -> Response:
        if self.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok", "running": self.worker.running, "waiting": self.worker.waiting})

    async def prometheus(self, _) -> Response:
        self.metrics.running.set(self.worker.running)
        self.metrics.waiting.set(self.worker.waiting)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def model(self) -> dict:
        return {"id": self.served.model, "object": "model", "created": self.created, "owned_by": "axis-by-axis"}

    async def one_model(self, request: Request) -> Response:
        self.served.check_model(request.path_params["name"])
        return JSONResponse(self.model())

    # Texts

    async def completions(self, request: Request) -> Response:
        """Both kinds: texts whole, or as they grow."""
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await read_body(request)
        except TimeoutError:
            raise RequestError(408, f"the request did not come whole in {self.timeout_s:g} s") from None
        asked = await asyncio.to_thread(self.served.parse_request, body, request.url.path.endswith("/chat/completions"))
        answers, answer = ResponseBuilder(asked, self.served.encoding), self.begin_texts(asked.texts)
        if asked.stream:
            return StreamingResponse(self.stream_events(request, answer, answers), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})  # fmt: skip
        async with self.cancel_on_disconnect(request, answer):
            async for news in answer:
                answers.add(news)
                self.check(news.ended)
        return JSONResponse(answers.full_response())

    def begin_texts(self, texts) -> TextStream:
        if self.worker.failure:
            raise RequestError(500, self.worker.failure)
        if self.draining:
            raise RequestError(503, "the server is about to end: it finishes what it has begun", Retry_After="10")
        if len(texts) > self.worker.max_texts:
            raise RequestError(400, f"{len(texts)} texts at a time; this server has room for {self.worker.max_texts}, "
                          "running and waiting", "n")  # fmt: skip
        try:
            return self.worker.begin(texts)
        except QueueFull:
            busy = f"{self.worker.running} texts are running and {self.worker.waiting} waiting"
            raise RequestError(429, f"{busy}; at most {self.worker.max_texts} may", Retry_After="1") from None

    async def stream_events(
        self, request: Request, answer: TextStream, answers: ResponseBuilder
    ) -> AsyncIterator[bytes]:
        try:
            async with self.cancel_on_disconnect(request, answer):
                async for news in answer:
                    self.check(news.ended)
                    if sent := answers.add(news):
                        yield sent
        except RequestError as refused:  # too late for a status
            yield event(refused.body)
        else:
            for sent in answers.final_events():
                yield sent

    def check(self, ended: str) -> None:
        """Raises: Refused if a text has ended without being done."""
        if ended == "timeout":
            raise RequestError(504, f"not done within {self.timeout_s:g} s; ask for fewer tokens, or give --timeout_s")
        if ended == "cancelled":
            raise RequestError(499, "the client has left")
        if ended.startswith("error"):
            raise RequestError(500, ended)

    @contextlib.asynccontextmanager
    async def cancel_on_disconnect(self, request: Request, answer: TextStream):
        """Meanwhile end the texts when the time is over or the client leaves; afterwards, whatever is left of them."""

        async def leave() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            answer.end("cancelled")

        loop = asyncio.get_running_loop()
        timer, leaving = loop.call_later(self.timeout_s, answer.end, "timeout"), loop.create_task(leave())
        try:
            yield
        finally:
            timer.cancel(), leaving.cancel()
            answer.end("cancelled")


async def read_body(request: Request) -> bytes:
    """Raises: Refused if it is too large, before all of it is read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_REQUEST_BYTES:
            raise RequestError(413, f"a request of more than {MAX_REQUEST_BYTES:,} bytes")
    return bytes(body)


async def error_response(_, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(
            error.status_code, f"{error.detail}: see /v1/models, /v1/completions, /v1/chat/completions"
        )
    elif not isinstance(error, RequestError):
        error = RequestError(500, f"{type(error).__name__}: {error}")
    return JSONResponse(error.body, error.status, error.headers)


# Around the paths -----------------------------------------------------------------------------------------------------


def require_api_key(app: ASGIApp, api_key: str) -> ASGIApp:
    """Let those who bring the key through to /v1 and /metrics."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if api_key and scope["type"] == "http" and scope["path"].startswith(("/v1", "/metrics")):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + api_key.encode()):
                error = RequestError(
                    401, "wrong API key: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
                )
                return await (await error_response(None, error))(scope, receive, send)
        return await app(scope, receive, send)

    return guard


def count_requests(app: ASGIApp, metrics: Metrics, paths: set[str]) -> ASGIApp:
    """Count the answers by path and status; paths that are not ours are one."""

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in paths else "other"
                metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        await app(scope, receive, counting if scope["type"] == "http" else send)

    return count
