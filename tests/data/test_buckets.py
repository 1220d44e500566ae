"""Buckets as their own clients and protocols have them: S3 by moto, GCS by its emulator, both on this machine."""

import http.server
import importlib.util
import json
import os
import re
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import dataset
import utils
from config import preset
from data import check, files, prepare
from reading import bucket
from tests.test_training import STEPS, flags, run
from utils import UserError

PACKAGES = ("moto", "s3fs", "gcp_storage_emulator", "gcsfs")
pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, PACKAGES)), reason="needs make extra-buckets")
KINDS = ("s3", "gs")
ALIKE = {  # the clients look for keys on this machine alone
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
    "NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
}  # fmt: skip
HANDLER = http.server.BaseHTTPRequestHandler  # of both servers


@pytest.fixture(scope="module")
def servers():
    """An S3 and a GCS, with a bucket in each, as the environment says where they are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALIKE.items():
            patch.setenv(name, value)
        from gcp_storage_emulator.server import create_server  # here, because they are extras, and read the environment
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        patch.setattr(HANDLER, "log_message", lambda *_: None)
        s3, gcs = ThreadedMotoServer("127.0.0.1", 0, verbose=False), create_server("127.0.0.1", 0, in_memory=True)
        s3.start(), gcs.start()
        where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.get_host_and_port()[1]}",
                 "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{gcs._api._httpd.server_port}"}  # fmt: skip
        for name, value in where.items():
            patch.setenv(name, value)
        for kind in KINDS:
            utils.file_system(f"{kind}://own")[0].mkdir("own")
        yield
        s3.stop(), gcs.stop()


@pytest.fixture(params=KINDS)
def place(request, servers, tmp_path, monkeypatch):
    """An address in a bucket that nothing lies at, for a process that has kept nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "WAITS_S", (0, 0, 0))
    monkeypatch.setattr(files, "WAITS_S", (0, 0, 0))
    forget()
    yield f"{request.param}://own/{uuid.uuid4().hex}"
    forget()


@pytest.fixture
def asked(monkeypatch):
    """What the servers are asked for; `asked.refuse` of it, from the next on, they answer with 503."""

    class Asked(list):
        refuse = 0

    found, honest, lock = Asked(), HANDLER.parse_request, threading.Lock()

    def parse(self):
        understood = honest(self)
        with lock:
            found.append((self.command, self.path, self.headers.get("Range")))
            refused, found.refuse = found.refuse > 0, max(found.refuse - 1, 0)
        if refused:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_error(503)
        return understood and not refused

    monkeypatch.setattr(HANDLER, "parse_request", parse)
    return found


def forget():
    """As in a new process."""
    bucket.cache.cache_clear()
    dataset._open.cache_clear()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"{n} words, and others of text {n}. " * (20 + n))
    return f"text:{folder}/*.txt"


def prepared(source, out):
    return prepare.main(["--source", source, "--val-share", "0.2", "--shard-tokens", "5000", "--out", str(out)])


def test_tokens_are_the_same_in_a_bucket(place, source, tmp_path, capsys):
    """Catches shards that are put together otherwise, work that is left in a bucket, and tokens that are made twice."""
    assert prepared(source, tmp_path / "here") == prepared(source, place) == 0
    system, root = utils.file_system(place)
    there = {os.path.relpath(name, root): system.cat_file(name) for name in system.find(root)}
    assert there == {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} and len(there) > 5
    assert prepared(source, place) == check.main([place]) == 0
    said = capsys.readouterr().out
    assert f"{place} is complete: " in said and f"{place}: every shard is what the manifest says" in said


def test_a_damaged_object_is_found(place, source, capsys):
    """Catches a check that trusts a bucket."""
    prepared(source, place)
    system, root = utils.file_system(place)
    shard = f"{root}/train-00001.npy"
    system.pipe_file(shard, system.cat_file(shard)[:-1] + b"\xff")
    assert check.main([place]) == 2
    assert f"{place}/train-00001.npy has sha256 " in capsys.readouterr().err


def test_a_run_reads_what_it_needs_through_a_bounded_folder(place, source, tmp_path, asked, monkeypatch):
    """Catches other batches than those of a disk, whole shards that are fetched, and a folder that grows."""
    monkeypatch.setattr(bucket, "BLOCK_BYTES", 1024)
    prepared(source, tmp_path / "here"), prepared(source, place)
    cfg = lambda path: preset("tiny", **{"data.path": str(path), "data.seq_len": 64, "data.batch_size": 3,
                                         "data.cache_gib": 9 * 1024 / 2**30})  # fmt: skip
    asked.clear()
    for step in range(12):
        one, other = dataset.batch(cfg(place), step), dataset.batch(cfg(tmp_path / "here"), step)
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) <= 9 * 1024
    blocks = [span for _, path, span in asked if "train-" in path]
    assert len(blocks) > 20 and all(re.fullmatch(r"bytes=\d*0*-\d+", span or "") for span in blocks)
    sizes = {int(stop) - int(start) + 1 for start, stop in (span.removeprefix("bytes=").split("-") for span in blocks)}
    assert sizes == {1024}


def test_a_server_that_is_busy_is_asked_again_and_the_reason_said(place, source, asked, capsys):
    """Catches a client that tries again without a word, and one answer of 503 that ends a command or a run."""
    asked.refuse = 2
    assert prepared(source, place) == 0
    # GCS's client asks for a file and for a folder of its name at once: both refusals are then one.
    said = re.findall(rf"(?m)^{place}: .*(503|Service Unavailable).*; again in 0 s$", capsys.readouterr().out)
    assert 1 <= len(said) <= 2 and asked.refuse == 0
    corpus = dataset.load(place)
    asked.refuse = 2
    assert len(corpus.splits["train"].read(10, 90)) == 80
    said = re.findall(rf"data       {place}/train-00000.npy, .*(503|Service Unavailable).*; again in 0 s",
                      capsys.readouterr().out)  # fmt: skip
    assert len(said) == 2 and asked.refuse == 0


def test_a_bucket_that_is_not_there_is_said_at_once(place, source, capsys):
    """Catches a typing error that makes a bucket, minutes of tries, and a client's own words and tracebacks."""
    gone, begin = place.replace("own", "gone"), time.monotonic()
    assert prepared(source, gone) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"error: {gone}/.unfinished-units: there is no such bucket (")
    assert not [line for line in lines if "Traceback" in line]
    with pytest.raises(UserError, match=rf"no tokens at '{gone}'"):
        dataset.load(gone)
    assert time.monotonic() - begin < 10 and not utils.file_system(gone)[0].exists("gone")


@pytest.mark.parametrize("address", ["AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"])
def test_a_server_that_is_gone_ends_a_start_within_half_a_minute(servers, address, monkeypatch):
    """Catches a client that waits on its own, and waits of ours that add up to more."""
    kind = dict(zip(("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"), KINDS, strict=True))[address]
    monkeypatch.setenv(address, "http://127.0.0.1:9")  # nobody answers at the port called discard
    assert sum(bucket.WAITS_S) <= 27 and sum(files.WAITS_S) <= 27
    monkeypatch.setattr(bucket, "WAITS_S", (0, 0))
    system = utils.file_system(f"{kind}://own")[0]
    type(system).clear_instance_cache()
    try:
        begin = time.monotonic()
        with pytest.raises(UserError, match=rf"{kind}://own/a/manifest\.json: .*[Cc]onnect.*; tried 3 times"):
            dataset.load(f"{kind}://own/a")
        assert time.monotonic() - begin < 2
    finally:
        type(system).clear_instance_cache()


def test_a_run_trains_and_goes_on_from_tokens_in_a_bucket(servers, source, tmp_path, monkeypatch):
    """Catches a run whose losses are others with its tokens in a bucket, or that does not go on there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place, schedule = f"gs://own/{uuid.uuid4().hex}", ["--optim.decay_steps", str(STEPS)]  # a program that is kept
    prepared(source, tmp_path / "here"), prepared(source, place)
    for tokens, runs, steps in ((tmp_path / "here", "a", 8), (place, "b", 5), (place, "b", 8)):
        status, _, complaint = run([*flags(tokens, tmp_path / runs), "--run.steps", str(steps), *schedule])
        assert status == 0, complaint
    losses = {}
    for runs in "ab":
        rows = map(json.loads, Path(tmp_path, runs, "small/metrics.jsonl").read_text().splitlines())
        losses[runs] = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    assert losses["b"] == losses["a"] and len(losses["a"]) == 8


def test_a_run_is_kept_on_a_disk(servers, tmp_path):
    """Catches a folder called gs: that a run makes where it is started."""
    status, _, complaint = run(flags(tmp_path, "gs://own/runs"))
    assert status == 2 and "run.dir='gs://own/runs': a run is kept on a disk" in complaint
