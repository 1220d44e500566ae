"""Shards in a bucket give the same batches from only this host's blocks, with a limited cache and clear errors."""

import functools
import http.server
import io
import os
import re
import shutil
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import fsspec
import numpy as np
import pytest

import dataset
from config import preset
from data import prepare
from data.reading import bucket
from utils import UserError

B, T = 8, 64
TOKENS, SHARD = 200_000, 30_000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("tokens") / "serial")
    prepare.from_ids(np.arange(TOKENS) % 60_000, out, vocab_size=60_000, shard_tokens=SHARD)
    return out


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A separate cache folder, small blocks, and no waits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(bucket, "WAITS_S", (0, 0, 0))
    forget()
    yield
    forget()


def forget():
    """Forget what this process has cached."""
    bucket.cache.cache_clear()
    dataset._open.cache_clear()


class Loopback(fsspec.AbstractFileSystem):
    """A bucket on a local HTTP server with range requests. It records requests, and fails on demand."""

    protocol, cachable = "loop", False
    port, asked, fail = 0, [], []

    def cat_file(self, path, start=None, end=None, **_):
        self.asked.append((path, start, end))
        if self.fail:
            raise self.fail.pop()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}")
        if end is not None:
            request.add_header("Range", f"bytes={start}-{end - 1}")
        try:
            return urllib.request.urlopen(request).read()
        except urllib.error.HTTPError as error:
            raise FileNotFoundError(path) if error.code == 404 else error from None

    def _open(self, path, *_, **__):
        return io.BytesIO(self.cat_file(path))


class Ranges(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            return self.send_error(404)
        contents = file.read_bytes()
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            contents = contents[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        self.wfile.write(contents)

    def log_message(self, *_):
        pass


@pytest.fixture
def loop(path):
    """loop://serial, the tokens of `path`."""
    handler = functools.partial(Ranges, directory=str(Path(path).parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    fsspec.register_implementation("loop", Loopback, clobber=True)
    Loopback.port, Loopback.asked, Loopback.fail = server.server_port, [], []
    yield "loop://serial"
    server.shutdown()
    server.server_close()


def config(path, **more):
    return preset("tiny", **{"data.path": path, "data.seq_len": T, "data.batch_size": B, "model.vocab_size": 60_008,
                             **more})  # fmt: skip


def assert_same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in other)


def cached_bytes():
    return sum(file.stat().st_size for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", ["loop", "file", "memory"])
def test_a_bucket_gives_the_same_batches(path, loop, kind):
    """Catches a header counted as tokens, a token lost at the edge of a block, and wrong windows across shards."""
    if kind == "memory":
        fsspec.filesystem("memory").put(path, "/serial", recursive=True)
    there = {"loop": loop, "file": f"file://{path}", "memory": "memory://serial"}[kind]
    for step in range(30):
        assert assert_same(dataset.batch(config(there), step), dataset.batch(config(path), step)), step
    for one, other in zip(*(dataset.evaluation_batches(config(p), 3) for p in (there, path)), strict=True):
        assert assert_same(one, other)
    dataset.verify(there)
    assert dataset.fingerprint(config(there)) == dataset.fingerprint(config(path))


def test_a_bucket_can_store_a_mixture(path, tmp_path):
    """Catches names that are joined to an address as if it were a local folder."""
    for name in ("a", "b"):
        shutil.copytree(path, tmp_path / "both" / name)
    one, other = (config(f"{how}{tmp_path}/both", **{"data.mixture": "a=0.5,b=0.5"}) for how in ("", "file://"))
    assert assert_same(dataset.batch(other, 7), dataset.batch(one, 7))


def test_a_host_downloads_only_its_blocks_and_only_once(path, loop):
    """Catches whole shards downloaded for one window, blocks downloaded twice, and other hosts' rows."""
    dataset.batch(config(loop), 0, rows=[2])
    blocks = [one for one in Loopback.asked if one[2]]
    assert len(blocks) <= 3, "the header's block, and one or two of the window"
    assert sum(end - start for _, start, end in blocks) <= 3 * 4096
    for step in range(300):
        dataset.batch(config(loop), step)
    assert len(Loopback.asked) == len(set(Loopback.asked)), "a block was fetched twice"
    forget()
    Loopback.asked.clear()
    dataset.batch(config(loop), 5)  # in a new process
    assert [name for name, *_ in Loopback.asked] == ["serial/manifest.json"]


def test_the_cache_has_a_limit(path, loop, monkeypatch):
    """Catches a disk that fills up, and a cache that deletes what was just used."""
    bound = 15 * 4096
    monkeypatch.setattr(bucket.cache(), "limit_bytes", bound)
    cfg = config(loop)
    for step in range(60):
        assert assert_same(dataset.batch(cfg, step), dataset.batch(config(path), step))
        assert cached_bytes() <= bound
    assert cached_bytes() > bound / 2
    asked = len(Loopback.asked)
    dataset.batch(cfg, 59)
    assert len(Loopback.asked) - asked <= 3, "the newest blocks went first"


def test_rewritten_tokens_are_not_read_from_the_cache(path, tmp_path):
    """Catches a rewritten bucket that is read from the cache of the old one."""
    prepare.from_ids(np.arange(5000) % 1000, str(tmp_path / "a"), vocab_size=1000)
    cfg = config(f"file://{tmp_path}/a")
    before = dataset.batch(cfg, 0)
    prepare.from_ids(np.arange(5000) % 999, str(tmp_path / "a"), vocab_size=1000, overwrite=True)
    forget()
    after = dataset.batch(cfg, 0)
    assert not assert_same(before, after) and assert_same(after, dataset.batch(config(str(tmp_path / "a")), 0))


def test_a_failed_request_is_retried_and_printed(loop, capsys):
    """Catches a run that ends because of one failed request, and retries that print nothing."""
    wanted = dataset.batch(config(loop), 3)
    forget()
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    dataset.load(loop)
    Loopback.fail[:] = [ConnectionResetError("the line is cut"), TimeoutError("no answer")]
    assert assert_same(dataset.batch(config(loop), 3), wanted)
    said = capsys.readouterr().out
    assert re.search(
        r"data       loop://serial/train-\d+\.npy, bytes from \d+: TimeoutError: no answer; retrying in 0 s", said
    )
    assert "ConnectionResetError: the line is cut" in said


@pytest.mark.parametrize("errors, message", [
    ([ConnectionResetError("cut")] * 99, r"serial/manifest\.json: ConnectionResetError: cut; gave up after 4 attempts"),
    ([PermissionError("no key")], r"serial/manifest\.json: PermissionError: no key$"),
    ([FileNotFoundError("serial")], r"no tokens at 'loop://serial' \(it has no manifest\.json\); prepare them with\n"),
])  # fmt: skip
def test_a_permanent_failure_ends_with_its_reason(loop, errors, message):
    """Catches a library's traceback, and minutes of retries that cannot succeed."""
    Loopback.fail[:] = errors
    with pytest.raises(UserError, match=message):
        dataset.batch(config(loop), 0)
    assert len(Loopback.asked) <= 4


def test_a_protocol_that_is_not_installed_is_named(monkeypatch):
    """Catches an ImportError during start-up."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # another test may load it
    with pytest.raises(UserError, match=r"s3://bucket/tokens: ImportError: .*s3fs"):
        dataset.load("s3://bucket/tokens")
    with pytest.raises(UserError, match=r"xyz://a: ValueError: Protocol not known: xyz"):
        dataset.load("xyz://a")


@pytest.mark.parametrize("how", ["dtype", "short"])
def test_a_damaged_shard_is_named(path, tmp_path, how):
    """Catches tokens of another dtype, or a truncated file, read as ids."""
    shutil.copytree(path, tmp_path / "own")
    for file in (tmp_path / "own").glob("train-*.npy"):
        if how == "dtype":
            np.save(file, np.load(file).astype(np.uint32))
        else:
            file.write_bytes(file.read_bytes()[:4096])
    message = r"train-\d+\.npy (has uint32 .*, but the manifest has uint16|ends before token \d+)"
    with pytest.raises(UserError, match=message):
        dataset.batch(config(f"file://{tmp_path}/own"), 0)


def test_only_shards_use_the_network(path, loop, monkeypatch):
    """Catches a library that sends other requests. Cached blocks need no network at all."""
    honest, called = socket.socket.connect, []
    monkeypatch.setattr(socket.socket, "connect", lambda s, to: called.append(to) or honest(s, to))
    for _, batch in zip(range(20), dataset.prefetch(config(loop), 0), strict=False):
        assert batch
    assert set(called) == {("127.0.0.1", Loopback.port)} and len(called) == len(Loopback.asked)
    called.clear()
    for step in range(20):
        dataset.batch(config(loop), step)
        dataset.batch(config(path), step)
    assert not called
