"""Who may use the server: hosts, web pages and keys; and connections that never send a request."""

import json
import socket
import time

import pytest

from tests import extras

pytestmark = extras.require("serve")

from serve import lifetime
from tests.generate.models import rule_text
from tests.serve.test_answers import completion
from tests.serve.test_refusals import ASKED, start_request, wait_until


def post(server, **headers):
    """Send a request as a page in a browser does, without a preflight; return the status and the response."""
    body = json.dumps(ASKED["completions"] | {"max_tokens": 2})
    got = server.client._client.post(f"{server.url}/v1/completions", content=body, headers=headers)
    return got.status_code, got


@pytest.mark.parametrize("name, foreign, own", [
    ("Host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.1", ""],
     ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]", "[::1]:8000", "127.0.0.9:8000"]),
    ("Origin", ["http://evil.example", "null", "http://localhost", "http://127.0.0.1:1", "https://127.0.0.1.evil.com"],
     ["OWN", "https://page.example"]),
])  # fmt: skip
def test_without_a_key_only_this_machine_and_its_pages_have_access(serve, name, foreign, own):
    """Catches a web page that uses the model of whoever reads it, directly or through a host name that resolves to
    this machine. With a key both are fine, because no page knows it."""
    with serve(host="127.0.0.9", cors="https://page.example") as server:
        for value in foreign:
            status, got = post(server, **{name: value})
            assert status == 403 and got.json()["error"]["message"].startswith(f"{name} {value!r}: without a key, ")
            assert "access-control-allow-origin" not in got.headers
            assert server.client._client.get(f"{server.url}/health", headers={name: value}).status_code == 403
        for value in own:
            assert post(server, **{name: value.replace("OWN", server.url)})[0] == 200, value
    with serve(api_key="sesame") as server:
        for value in foreign:
            assert post(server, **{name: value})[0] == 401
            assert post(server, **{name: value, "Authorization": "bearer sesame"})[0] == 200


@pytest.mark.parametrize("key", [{}, {"api_key": "sesame"}])
def test_a_page_of_your_own_has_access(serve, key):
    """Catches a preflight request that needs the key, headers that the browser needs, and other pages that get them."""
    page, other = "https://page.example", "https://evil.example"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true",
             "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    with serve(cors=page, **key) as server:
        preflight = lambda origin: server.client._client.options(
            f"{server.url}/v1/completions", headers=asked | {"Origin": origin}
        )
        got = preflight(page)
        allowed = {name: got.headers[f"access-control-allow-{name}"]
                   for name in ("origin", "methods", "headers", "private-network")}  # fmt: skip
        assert (got.status_code, allowed) == (200, {
            "origin": page, "methods": "GET, POST", "private-network": "true",
            "headers": asked["Access-Control-Request-Headers"]})  # fmt: skip
        assert preflight(other).status_code == 400 and "access-control-allow-origin" not in preflight(other).headers
        authorization = {"Authorization": "Bearer sesame"} if key else {}
        for more, status in [(authorization, 200)] + [({}, 401)] * bool(key):
            got = post(server, Origin=page, **more)
            assert (got[0], got[1].headers["access-control-allow-origin"]) == (status, page)
    with serve(**key) as server:
        assert server.client._client.options(server.url, headers=asked | {"Origin": page}).status_code == (
            405 if key else 403
        )


def receive_all(client) -> bytes:
    client.settimeout(20)
    return b"".join(iter(lambda: client.recv(9999), b""))


def test_a_connection_without_a_header_ends(serve, monkeypatch):
    """Catches silent clients, and those that send a header byte by byte, before their first request or after it: they
    would hold connections forever."""
    monkeypatch.setattr(lifetime, "HEADER_SECONDS", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serve() as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        clients = [socket.create_connection(address) for _ in range(3)]
        clients[1].sendall(whole[:-2])
        clients[2].sendall(whole + whole[:-2])
        assert receive_all(clients[0]) == receive_all(clients[1]) == b""
        assert receive_all(clients[2]).startswith(b"HTTP/1.1 200 ")
        for client in clients:
            client.close()
        wait_until(lambda: not server.http.server_state.connections)
        assert completion(server, max_tokens=2).choices[0].text == rule_text("!", 2)[1:]


def test_a_long_answer_outlives_the_time_for_a_header(serve, gate, monkeypatch):
    """Catches an answer that is cut off because its connection is older than the limit."""
    monkeypatch.setattr(lifetime, "HEADER_SECONDS", 0.2)
    with serve() as server:
        texts: list = []
        thread = start_request(server, texts, max_tokens=3)
        wait_until(lambda: server.worker.streams)
        time.sleep(0.5)
        gate.set()
        thread.join()
        assert texts == [rule_text("!", 3)[1:]]


def test_a_client_that_does_not_read_is_disconnected(serve, monkeypatch):
    """Catches a response that waits forever for its client, also after the timeout of the request; and a client that is
    disconnected although it reads on. asyncio calls `pause_writing` when the buffers of both machines are full."""
    monkeypatch.setattr(lifetime, "READ_SECONDS", 0.3)
    with serve() as server:
        connections, address = server.http.server_state.connections, server.url.removeprefix("http://").split(":")
        clients = [socket.create_connection(address) for _ in range(2)]
        wait_until(lambda: len(connections) == 2)
        for connection in [*connections]:
            connection.loop.call_soon_threadsafe(connection.pause_writing)
            if connection.client == clients[0].getsockname():
                connection.loop.call_soon_threadsafe(connection.resume_writing)
        assert receive_all(clients[1]) == b""
        clients[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert receive_all(clients[0]).startswith(b"HTTP/1.1 200 ")
        for client in clients:
            client.close()


def test_two_lengths_of_a_request_are_refused(server):
    """Catches request smuggling: a proxy that believes one of the two sees other requests than the server."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(head + b"0\r\n\r\n")
        got = receive_all(client)
    assert got.startswith(b"HTTP/1.1 400 ") and b"both Content-Length and Transfer-Encoding" in got
