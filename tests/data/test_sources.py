"""A text is read the same from any location, compressed or split; errors name the file, and come soon."""

import gzip
import http.server
import json
import random
import re
import socket
import sys
import threading
import time

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import dataset
from data import files, prepare, sources
from utils import UserError

END = "<|endoftext|>"


def read_texts(source, field="text"):
    return [(document.name, document.text.decode()) for document in sources.read_documents(source, field)]


def read_by_units(source):
    """Read the documents of a source, unit by unit."""
    return [
        document for unit in sources.make_units(source) for part in unit for document in sources.read_part(part, "text")
    ]


def refusal(source):
    with pytest.raises(UserError) as error:
        read_texts(source)
    return str(error.value)


def zstd(contents):
    return pyarrow.compress(contents, "zstd", asbytes=True)


ROWS = [f"row {n}, née 五 " * (n % 7) for n in range(60)]
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()


@pytest.fixture
def bucket():
    """A bucket in memory."""
    fs = fsspec.filesystem("memory")
    yield fs
    for path in fs.ls("/", detail=False):
        fs.rm(path, recursive=True)


# Compressed files


@pytest.mark.parametrize("place", ["here", "bucket", "file://"])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_compressed_files_are_decompressed(tmp_path, bucket, place, ending):
    """Catches a .gz taken for text, the second member of one that is lost, and a name that depends on the file's
    location."""
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[ending]
    middle = LINES.index(b"\n", len(LINES) // 2) + 1
    contents = {f"a/rows.jsonl{ending}": pack(LINES[:middle]) + pack(LINES[middle:]), f"b.txt{ending}": pack(LINES)}
    for name, content in contents.items():
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        bucket.pipe(f"/top/{name}", content)
    root = {"here": str(tmp_path), "bucket": "memory://top", "file://": f"file://{tmp_path}"}[place]
    assert read_texts(f"jsonl:{root}/**/rows.jsonl*") == [
        (f"a/rows.jsonl{ending}:{n}", row) for n, row in enumerate(ROWS, 1)
    ]
    assert read_texts(f"text:{root}/*.txt*") == [(f"b.txt{ending}", LINES.decode())]
    assert [name for name, _ in read_texts(f"jsonl:{root}")] == [
        name for name, _ in read_texts(f"jsonl:{root}/**/rows.jsonl*")
    ]


@pytest.mark.parametrize("ending, pack", [(".gz", gzip.compress), (".zst", zstd)])
def test_a_truncated_file_is_refused(tmp_path, ending, pack):
    """Catches an interrupted download whose first half silently becomes tokens."""
    path = tmp_path / f"rows.jsonl{ending}"
    whole = pack(LINES * 20)
    for damaged in (whole[: len(whole) // 2], LINES, whole[:20] + b"\0" * 20 + whole[40:]):
        path.write_bytes(damaged)
        assert re.search(rf"rows\.jsonl{ending}: truncated, or not {'gzip' if ending == '.gz' else 'zstd'}: ",
                         refusal(f"jsonl:{path}"))  # fmt: skip


def test_a_damaged_parquet_file_is_named(tmp_path):
    """Catches pyarrow's own error, and rows before the damage that become tokens."""
    path = tmp_path / "rows.parquet"
    rng = random.Random(0)
    table = pyarrow.table({"text": [str(rng.random()) for _ in range(3000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" * 3000 + whole[len(whole) // 2 + 3000 :])
    assert re.search(r"rows\.parquet: damaged after row \d+: ", refusal(f"parquet:{path}"))
    path.write_bytes(whole[: len(whole) // 2])
    assert "rows.parquet: not a Parquet file" in refusal(f"parquet:{path}")


# Several documents in a file of text


@pytest.mark.parametrize("line", ["", "\n", "\r\n"])
def test_an_end_of_text_in_a_text_separates_documents(tmp_path, line):
    """Catches several stories in one document, line breaks that belong to the separator, and empty documents."""
    stories = ["once", "", "upon\n\na time", "an end of text, <|endoftext, is text"]
    path = tmp_path / "stories.txt"
    wanted = [(f"stories.txt:{n}", story) for n, story in enumerate(stories, 1) if story]
    for last in ("", END, END + line):
        path.write_bytes((line + END + line).join([*stories]).encode() + (line + last).encode() * bool(last))
        assert read_texts(f"text:{path}") == wanted
    path.write_text("one\n")
    assert read_texts(f"text:{path}") == [("stories.txt", "one\n")]


def test_an_end_of_text_in_a_row_is_text(tmp_path):
    """Catches rows that can forge a document boundary."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": f"a{END}b"}))
    assert read_texts(f"jsonl:{tmp_path}/rows.jsonl") == [("rows.jsonl:1", f"a{END}b")]
    prepare.main(["--out", str(tmp_path / "out"), "--source", f"jsonl:{tmp_path}/rows.jsonl"])
    manifest = dataset.load(str(tmp_path / "out")).manifest
    assert [split["documents"] for split in manifest["splits"].values()] == [1, 1]


# Units of work


@pytest.mark.parametrize("chunk_bytes", [1, 5, 64, 10_000])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_documents_do_not_depend_on_where_a_file_is_split(tmp_path, monkeypatch, kind, chunk_bytes):
    """Catches documents lost, doubled or renamed at a split, and a separator that spans two reads."""
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(sources, "WINDOW_BYTES", chunk_bytes)
    path = tmp_path / f"all.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), path, row_group_size=7)
    else:
        path.write_bytes(LINES if kind == "jsonl" else f"\n{END}\n".join(ROWS).encode())
    (tmp_path / "small.text").write_text("small")
    whole = [*sources.read_documents(f"{kind}:{path}")]
    assert len(whole) == len([row for row in ROWS if row or kind != "text"])
    for unit_bytes in (1, 50, 200, 10**6):
        monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", unit_bytes)
        assert read_by_units(f"{kind}:{path}") == whole
        cut = sources.make_units(f"{kind}:{path}")
        assert (len(cut) == 1) == (unit_bytes == 10**6)
        assert sources.make_units(f"{kind}:{path}") == cut, "units depend on the source alone"
        if unit_bytes == 200 and kind != "parquet":
            sizes = [part.stop - part.start for unit in cut for part in unit]
            assert min(sizes[:-1]) >= 200 and max(sizes) < 200 + 130 and sum(sizes) == path.stat().st_size


def test_small_files_share_a_unit_and_large_text_stays_whole(tmp_path, monkeypatch):
    """Catches one unit for each of a million small files, and a document cut because it is large."""
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 100)
    for n in range(20):
        (tmp_path / f"{n:02}.txt").write_text("x" * (1000 if n == 10 else 30))
    cut = sources.make_units(f"text:{tmp_path}")
    assert [len(unit) for unit in cut] == [4, 4, 3, 4, 4, 1]
    assert read_by_units(f"text:{tmp_path}") == [*sources.read_documents(f"text:{tmp_path}")]


def test_units_grow_with_the_source_up_to_a_limit():
    """Catches a manifest of a million units, and a unit that does not fit into memory."""
    assert sources.LEAST_UNIT_BYTES <= 2**22 and sources.MOST_UNIT_BYTES <= 2**26
    assert 2**40 / sources.MOST_UNIT_BYTES < 20_000


# Buckets


def test_a_bucket_works_like_a_folder(tmp_path, bucket, capsys):
    """Catches tokens that depend on the location of text or shards, leftover files, and work that is repeated."""
    for n in range(30):
        text = f"text {n} " * n
        bucket.pipe(f"/in/{n}.txt", text.encode())
        (tmp_path / f"{n}.txt").write_text(text)
    words = ["--val-share", "0.3", "--shard-tokens", "500"]
    assert prepare.main(["--source", f"text:{tmp_path}/*.txt", "--out", str(tmp_path / "out"), *words]) == 0
    for _ in range(2):
        assert prepare.main(["--source", "text:memory://in/*.txt", "--out", "memory://b/tokens", *words]) == 0
    assert "b/tokens is complete" in capsys.readouterr().out
    here = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    there = {path.rsplit("/", 1)[1]: bucket.cat(path) for path in bucket.find("/b/tokens")}
    manifests = [json.loads(one.pop("manifest.json")) for one in (here, there)]
    assert here == there and len(here) > 5
    for manifest in manifests:
        assert manifest.pop("arguments")["source"] == manifest.pop("sources")[0]["source"]
    assert manifests[0] == manifests[1]
    found = dataset.load("memory://b/tokens").splits["train"]
    assert np.array_equal(found.read(0, 900), dataset.load(str(tmp_path / "out")).splits["train"].read(0, 900))


def test_a_missing_package_for_a_bucket_is_named(monkeypatch):
    """Catches a traceback, and a message without the package's name."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # another test may load it
    assert re.search(r"s3://none/x: .*s3fs.*; install the package into .venv", refusal("text:s3://none/x"))


@pytest.mark.parametrize("failures, status", [(2, 0), (9, 2)])
@pytest.mark.parametrize("call, what", [("open", "/in/a.txt"), ("cat_file", "/out/tokens/.unfinished-units"),
                                        ("cp_file", "/out/tokens/.unfinished-units")])  # fmt: skip
def test_a_failed_request_to_a_bucket_is_retried_and_printed(bucket, monkeypatch, capsys, failures, status, call, what):
    """Catches a night's work lost to one failed request, a retry without its reason, and a client's own traceback."""
    monkeypatch.setattr(files, "WAITS_S", (0, 0, 0))
    bucket.pipe("/in/a.txt", b"some text " * 50)
    whole, left = getattr(type(bucket), call), [failures]

    def fails(self, path, *args, **more):
        if what in path and left[0]:
            left[0] -= 1
            raise RuntimeError("503 Slow Down")
        return whole(self, path, *args, **more)

    monkeypatch.setattr(type(bucket), call, fails)
    assert prepare.main(["--source", "text:memory://in/a.txt", "--out", "memory://out/tokens"]) == status
    said = capsys.readouterr()
    assert said.out.count("RuntimeError: 503 Slow Down; retrying in 0 s\n") == min(failures, 3)
    assert what in next(line for line in said.out.splitlines() if line.startswith("memory://"))
    if status:
        assert said.err.startswith("error: memory://")
        assert said.err.endswith(": RuntimeError: 503 Slow Down; gave up after 4 attempts. Check the network.\n")


class Silent:
    """A bucket that never answers."""

    def glob(self, *_, **__):
        time.sleep(60)


def test_a_bucket_that_does_not_answer_is_an_error(monkeypatch):
    """Catches a client that silently retries for minutes."""
    assert files.ANSWER_S < 30 and 2 * files.REQUEST_S < 30
    monkeypatch.setattr(files, "ANSWER_S", 0.3)
    monkeypatch.setattr(files, "file_system_of", lambda pattern: (Silent(), "x"))
    assert refusal("text:s3://b/x") == "s3://b/x: timed out after 0.3 s; check the network and the URL"


# A web server


@pytest.fixture
def web(monkeypatch):
    """A web server on loopback: its address, its files, and the ranges that were requested."""
    held, asked = {}, []
    ranges = ["answered"]  # empty: a server that sends the whole file

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            asked.append((self.command, self.headers.get("Range")))
            content = held.get(self.path[1:])
            if content is None:
                self.answer(b"", 404)
                return
            start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            self.answer(content[start:], 206 if start else 200) if ranges else self.answer(content)

        def answer(self, content, status=200):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield f"http://127.0.0.1:{server.server_port}", held, asked, ranges
    server.shutdown()
    server.server_close()


def test_a_file_on_a_web_server_is_read_by_ranges(web):
    """Catches a large file in memory, and a truncated response taken for the end of the file."""
    root, held, asked, ranges = web
    held["a.jsonl"] = LINES
    with files.open_stored(f"{root}/a.jsonl") as file:
        file.seek(1000)
        assert file.read(10) == LINES[1000:1010]
    assert [found for command, found in asked if command == "GET"] == ["bytes=1000-"]
    assert [row for _, row in read_texts(f"jsonl:{root}/a.jsonl")] == ROWS
    ranges.clear()
    with files.open_stored(f"{root}/a.jsonl") as file:
        file.seek(1000)
        with pytest.raises(UserError, match="rejects range requests; download the file first"):
            file.read(10)


def test_a_missing_file_on_a_web_server_is_reported(web):
    """Catches urllib's traceback."""
    assert refusal(f"jsonl:{web[0]}/b.jsonl") == f"{web[0]}/b.jsonl: 404 Not Found"


@pytest.mark.parametrize("listening", [False, True], ids=["refused", "no answer"])
def test_an_unreachable_server_is_reported_soon(monkeypatch, listening):
    """Catches minutes of retries where there is no network."""
    monkeypatch.setattr(files, "REQUEST_S", 0.3)
    with socket.socket() as stand_in:
        stand_in.bind(("127.0.0.1", 0))
        if listening:
            stand_in.listen()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        began = time.monotonic()
        said = refusal(f"text:http://127.0.0.1:{stand_in.getsockname()[1]}/a.txt")
        assert time.monotonic() - began < 5
    assert re.search(r"cannot be reached \((timed out|.*refused)\); check the network and the URL, or ", said)
    assert "pass it as text:FILE, jsonl:FILE or parquet:FILE" in said
