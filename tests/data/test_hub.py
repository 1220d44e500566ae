"""Data sets of the Hugging Face hub, read with the library `datasets` from a hub on loopback.

The library reads HF_ENDPOINT when it is imported, so each test reads in a process of its own.
"""

import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import prepare, sources, tasks
from utils import UserError

ROOT = Path(__file__).resolve().parents[2]
ROWS = [f"row {n}, née 五 " * (n % 7) for n in range(60)]
CARD = """---
configs:
- config_name: default
  data_files:
  - split: test
    path: data/test.parquet
  - split: train
    path: data/train-*
- config_name: small
  data_files: small/*
---
"""
API = "/api/datasets/me/set"
FILES = "/datasets/me/set/resolve/"


def parquet(rows):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "n": [*range(len(rows))]}), sink, row_group_size=5)
    return sink.getvalue().to_pybytes()


class Hub(http.server.ThreadingHTTPServer):
    """A hub with one data set, me/set, at the commit c0ffee. It notes each request's path and token."""

    def __init__(self, held):
        self.held, self.asked = held, []
        super().__init__(("127.0.0.1", 0), Handler)

    def under(self, folder):
        """The entries of a folder, as the hub lists them."""
        names = {name.removeprefix(f"{folder}/") for name in self.held if name.startswith(f"{folder}/") or not folder}
        for name in sorted({name.partition("/")[0] for name in names}):
            path = f"{folder}/{name}".lstrip("/")
            size = len(self.held.get(path, b""))
            kind = "file" if path in self.held else "directory"
            yield {"type": kind, "path": path, "size": size, "oid": hashlib.sha1(path.encode()).hexdigest()}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        held, path = self.server.held, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.asked.append((path, self.headers.get("Authorization")))
        if path in (API, f"{API}/revision/c0ffee"):
            names = [{"rfilename": name, "size": len(content)} for name, content in held.items()]
            self.answer(json.dumps({"id": "me/set", "sha": "c0ffee", "siblings": names}).encode())
        elif path.startswith(f"{API}/tree/c0ffee"):
            folder = path.removeprefix(f"{API}/tree/c0ffee").strip("/")
            self.answer(json.dumps([*self.server.under(folder)]).encode())
        elif path.startswith(FILES) and (name := path.removeprefix(FILES).partition("/")[2]) in held:
            content, whole = held[name], f"bytes=0-{len(held[name]) - 1}"
            start, stop = (self.headers.get("Range") or whole).removeprefix("bytes=").split("-")
            part = content[int(start) : int(stop) + 1]
            place = {"Content-Range": f"bytes {start}-{stop}/{len(content)}"} if "Range" in self.headers else {}
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.answer(part, 206 if place else 200, {"ETag": etag, "X-Repo-Commit": "c0ffee"} | place)
        else:
            self.answer(b"", 404)

    def answer(self, content, status=200, more=()):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **dict(more)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = Hub({"data/train-00000.parquet": parquet(ROWS[:30]), "data/train-00001.parquet": parquet(ROWS[30:]),
                  "data/test.parquet": parquet(["test"]), "small/a.parquet": parquet(ROWS[:7]),
                  "README.md": CARD.encode()})  # fmt: skip
    threading.Thread(target=server.serve_forever).start()
    yield server
    server.shutdown()
    server.server_close()


def run(code, port, home, *words):
    """Run code in a process of its own, and return what it printed as JSON, line by line, and its standard error."""
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_TOKEN": "hf_mine",
                        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
                        "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


READ = """
import json, sys
from data import files, sources
from utils import UserError
files.REQUEST_S = float(sys.argv[1])
for source, field, least in json.loads(sys.argv[2]):
    sources.LEAST_UNIT_BYTES = least
    try:
        read = [[*sources.read_part(part, field)] for unit in sources.make_units(source) for part in unit]
        print(json.dumps([[[name, text.decode()] for name, text in part] for part in read]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.extra("datasets")
def test_a_data_set_of_the_hub_is_read_by_name(hub, tmp_path):
    """Catches training on the test split, another configuration's files, a commit that is not pinned, rows that are
    lost or doubled between two units, and an error without its reason."""
    row_group = sum(len(content) for name, content in hub.held.items() if "train" in name) // 12
    wanted = [("hf:me/set", "text", 100), ("hf:me/set", "text", row_group), ("hf:me/set", "text", 10**6),
              ("hf:me/set:small", "text", 100), ("hf:me/set:big", "text", 100), ("hf:me/none", "text", 100),
              ("hf:me/set", "body", 100)]  # fmt: skip
    (*parts, small, big, none, body), _ = run(READ, hub.server_port, tmp_path, "10", json.dumps(wanted))
    rows = [[row for part in one for row in part] for one in parts]
    assert rows[0] == rows[1] == rows[2], "names and texts depend on the units"
    assert [text for _, text in rows[0]] == ROWS
    assert [len([part for part in one if part]) for one in parts][::2] == [12, 1], "a unit for each row group, and one"
    assert [text for part in small for _, text in part] == ROWS[:7]
    assert "hf:me/set:big: ValueError: BuilderConfig 'big' not found. Available: ['default', 'small']; check the" in big
    assert re.match(r"hf:me/none: .*404 Not Found.*; check the name, the network and HF_TOKEN, or download a", none)
    assert body == "hf://me/set from byte 0 on: no field 'body'; it has text, n; choose one with --text-field"
    assert {token for path, token in hub.asked if path.endswith(".parquet")} == {"Bearer hf_mine"}
    assert {path.split("/")[5] for path, _ in hub.asked if path.endswith(".parquet")} == {"c0ffee"}


PREPARE = """
import contextlib, io, json, sys
from data import prepare, shards, sources
sources.LEAST_UNIT_BYTES, left, write = 100, [3], shards.write_unit

def fails(*args):
    if not left[0]:
        raise KeyboardInterrupt
    left[0] -= 1
    write(*args)

def run(out):
    with contextlib.redirect_stdout(io.StringIO()):
        return prepare.prepare(prepare.Arguments(out, "hf:me/set", val_share=0.3))

shards.write_unit = fails
try:
    run(sys.argv[1] + "/resumed")
except KeyboardInterrupt:
    left[0] = 10**9
before = 10**9 - left[0]
for out in ("resumed", "whole"):
    manifest = run(f"{sys.argv[1]}/{out}")
    print(json.dumps(manifest["splits"]))
    print(json.dumps(10**9 - left[0]))
"""


@pytest.mark.extra("datasets")
def test_tokenizing_a_data_set_of_the_hub_resumes(hub, tmp_path):
    """Catches rows that are lost or doubled by an interruption, and finished units that are repeated."""
    (resumed, units, whole, total), _ = run(PREPARE, hub.server_port, tmp_path / "home", str(tmp_path))
    assert resumed == whole and sum(split["documents"] for split in whole.values()) == len(ROWS)
    assert total - units == units + 3, "the resumed run repeats the three finished units"


@pytest.mark.extra("datasets")
@pytest.mark.parametrize("listening", [False, True], ids=["refused", "no answer"])
def test_an_unreachable_hub_is_reported_soon(tmp_path, listening):
    """Catches minutes of retries where there is no network."""
    with socket.socket() as stand_in:
        stand_in.bind(("127.0.0.1", 0))
        if listening:
            stand_in.listen()
        port, wanted = stand_in.getsockname()[1], json.dumps([("hf:me/set", "text", 100)])
        (said,), stderr = run(READ, port, tmp_path, "0.3", wanted)
    assert re.match(r"hf:me/set: \w+: (timed out|.*refused); check the name, the network and HF_TOKEN, or ", said)
    assert "pass it as text:FILE, jsonl:FILE or parquet:FILE" in said
    assert "Retrying" not in stderr


def test_a_missing_library_is_named(monkeypatch):
    """Catches a traceback, and a message without the command that installs the library."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="hf:me/set needs the package datasets; install it with: make extra-datasets"):
        sources.make_units("hf:me/set")


@pytest.mark.extra("datasets")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_library_is_a_source(tmp_path, streaming):
    """Catches a data set that is taken for a list of texts, one that only the first split reads, and lost fields."""
    import datasets

    rows = [{"question": f"{n}?", "reply": f"{n}!", "n": n} for n in range(60)]
    source = datasets.Dataset.from_list(rows)
    source = source.to_iterable_dataset() if streaming else source
    task = tasks.Task("own", "", source, (tasks.rekey(prompt="question", answer="reply"),), val_share=0.3)
    found = {split: [*tasks.documents(task, split)] for split in tasks.SPLITS}
    assert all(found.values())
    assert sorted(one["answer"] for both in found.values() for one in both) == sorted(row["reply"] for row in rows)
    manifest = prepare.from_texts(source, str(tmp_path / "out"), text_field="reply", val_share=0.3)
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(rows)
