"""The HTTP paths of the server and their responses."""

import asyncio
import contextlib
import hmac
import html
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.metrics import Metrics
from serve.protocol import RequestError, ResponseBuilder, ServedModel, event
from serve.worker import QueueFull, TextStream, Worker

MAX_REQUEST_BYTES = 2**20
PAGE = Path(__file__).parent / "page.html"


@dataclass(frozen=True)
class Access:
    """Which clients may use the server.

    api_key  key required for /v1 and /metrics; empty: none, and only programs and pages of this machine have access
    host     address that the server listens on
    cors     origin of a page that has access, in addition to the server's own page; empty: none
    """

    api_key: str = ""
    host: str = "127.0.0.1"
    cors: str = ""

    def check(self, scope: Scope) -> None:
        """Raises: RequestError if a request has no access."""
        headers = Headers(scope=scope)
        if {"content-length", "transfer-encoding"} <= {*headers}:  # a proxy may see another end of the request
            why = "the request has both Content-Length and Transfer-Encoding; send one of them"
            raise RequestError(400, why, Connection="close")
        if self.api_key:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(key.encode("latin-1"), self.api_key.encode())
            if scope["path"].startswith(("/v1", "/metrics")) and not (same and scheme.lower() == "bearer"):
                why = "wrong API key: send it as `Authorization: Bearer KEY`"
                raise RequestError(401, why, code="invalid_api_key")
            return
        # Any page in a browser can send requests to this machine, under its own host name too (DNS rebinding).
        host, origin = headers.get("host", ""), headers.get("origin")
        local = {"localhost", "127.0.0.1", "[::1]", self.host, f"[{self.host}]"}
        if re.sub(r":\d*$", "", host).lower() not in local:
            raise RequestError(403, f"Host {host!r:.60}: without a key, the server must be addressed as localhost, "
                                    "127.0.0.1, [::1] or its --host; use one of them, or --api_key_file")  # fmt: skip
        if origin not in (None, f"http://{host}", f"https://{host}", self.cors or None):
            raise RequestError(403, f"Origin {origin!r:.60}: without a key, the server allows only its own page; start "
                                    "it with --cors ORIGIN to allow another one")  # fmt: skip


class Server:
    """The HTTP application around a worker.

    timeout_s  maximum duration of a request in seconds, including its wait for a slot
    draining   true after a shutdown signal, while the server only finishes requests that it has accepted
    """

    def __init__(self, served: ServedModel, worker: Worker, metrics: Metrics, access: Access, timeout_s: float = 600):
        self.served, self.worker, self.metrics = served, worker, metrics
        self.timeout_s, self.draining = timeout_s, False
        self.created = int(time.time())
        get, post = (lambda path, answer, how=how: Route(path, answer, methods=[how]) for how in ("GET", "POST"))
        app = Starlette(
            routes=[
                get("/", lambda _: HTMLResponse(PAGE.read_text().replace("MODEL", html.escape(served.model)))),
                get("/health", self.health),
                get("/metrics", self.prometheus),
                get("/v1/models", lambda _: JSONResponse({"object": "list", "data": [self.model_json()]})),
                get("/v1/models/{name}", self.get_model),
                post("/v1/completions", self.completions),
                post("/v1/chat/completions", self.completions),
            ],
            exception_handlers={RequestError: error_response, HTTPException: error_response, Exception: error_response},
        )
        self.app = count_requests(restrict_access(app, access), metrics, {route.path for route in app.routes})

    # About the server

    async def health(self, _) -> Response:
        if self.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok", "running": self.worker.running, "waiting": self.worker.waiting})

    async def prometheus(self, _) -> Response:
        self.metrics.running.set(self.worker.running)
        self.metrics.waiting.set(self.worker.waiting)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def model_json(self) -> dict:
        return {"id": self.served.model, "object": "model", "created": self.created, "owned_by": "axis-by-axis"}

    async def get_model(self, request: Request) -> Response:
        self.served.check_model(request.path_params["name"])
        return JSONResponse(self.model_json())

    # Texts

    async def completions(self, request: Request) -> Response:
        """Answer a completion or a chat completion, as one JSON object or as a stream."""
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await read_body(request)
        except TimeoutError:
            raise RequestError(408, f"the request body did not arrive within {self.timeout_s:g} s") from None
        asked = await asyncio.to_thread(self.served.parse_request, body, request.url.path.endswith("/chat/completions"))
        answers, answer = ResponseBuilder(asked, self.served.encoding), self.begin_texts(asked.texts)
        if asked.stream:
            return StreamingResponse(self.stream_events(request, answer, answers), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})  # fmt: skip
        async with self.cancel_on_disconnect(request, answer):
            async for news in answer:
                answers.add(news)
                self.check_ended(news.ended)
        return JSONResponse(answers.full_response())

    def begin_texts(self, texts) -> TextStream:
        if self.worker.failure:
            raise RequestError(500, self.worker.failure)
        if self.draining:
            raise RequestError(503, "the server is shutting down and accepts no new requests", Retry_After="10")
        if len(texts) > self.worker.max_texts:
            raise RequestError(400, f"the request has {len(texts)} texts, but this server runs and queues at most "
                          f"{self.worker.max_texts}; request fewer", "n")  # fmt: skip
        try:
            return self.worker.begin(texts)
        except QueueFull:
            busy = f"{self.worker.running} texts are running and {self.worker.waiting} waiting"
            raise RequestError(429, f"{busy}; the limit is {self.worker.max_texts}", Retry_After="1") from None

    async def stream_events(
        self, request: Request, answer: TextStream, answers: ResponseBuilder
    ) -> AsyncIterator[bytes]:
        try:
            async with self.cancel_on_disconnect(request, answer):
                async for news in answer:
                    self.check_ended(news.ended)
                    if sent := answers.add(news):
                        yield sent
        except RequestError as refused:  # the status line has already been sent
            yield event(refused.body)
        else:
            for sent in answers.final_events():
                yield sent

    def check_ended(self, ended: str) -> None:
        """Raises: RequestError if a text was cut short by a timeout, a disconnect or an engine failure."""
        if ended == "timeout":
            raise RequestError(504, f"timeout after {self.timeout_s:g} s; request fewer tokens or raise --timeout_s")
        if ended == "cancelled":
            raise RequestError(499, "the client disconnected")
        if ended.startswith("error"):
            raise RequestError(500, ended)

    @contextlib.asynccontextmanager
    async def cancel_on_disconnect(self, request: Request, answer: TextStream):
        """End the texts at the timeout or when the client disconnects. On exit, cancel all unfinished texts."""

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
    """Read the request body. Raises: RequestError as soon as it exceeds MAX_REQUEST_BYTES."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_REQUEST_BYTES:
            raise RequestError(413, f"the request body is larger than {MAX_REQUEST_BYTES:,} bytes")
    return bytes(body)


async def error_response(_, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(
            error.status_code, f"{error.detail}; use /v1/models, /v1/completions or /v1/chat/completions"
        )
    elif not isinstance(error, RequestError):
        error = RequestError(500, f"{type(error).__name__}: {error}")
    body = json.dumps(error.body)  # escapes half of a surrogate pair, which UTF-8 cannot encode
    return Response(body, error.status, error.headers, "application/json")


# Middleware -----------------------------------------------------------------------------------------------------------


def restrict_access(app: ASGIApp, access: Access) -> ASGIApp:
    """Wrap an app to refuse requests without access, and to tell browsers which page has it."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                access.check(scope)
            except RequestError as error:
                return await (await error_response(None, error))(scope, receive, send)
        return await app(scope, receive, send)

    if not access.cors:
        return guard
    return CORSMiddleware(guard, [access.cors], ("GET", "POST"), ("*",), allow_private_network=True)


def count_requests(app: ASGIApp, metrics: Metrics, paths: set[str]) -> ASGIApp:
    """Wrap an app to count responses by path and status; unknown paths are counted together as "other"."""

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in paths else "other"
                metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        await app(scope, receive, counting if scope["type"] == "http" else send)

    return count
