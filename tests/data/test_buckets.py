"""Buckets with their real clients and protocols: S3 by moto, GCS by its emulator, both on this machine."""

import asyncio
import http.server
import json
import os
import re
import signal
import socketserver
import threading
import time
import uuid
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest

import dataset
import sharding
from config import preset
from data import check, files, prepare
from data.reading import bucket
from generate import load
from tests.test_training import flags, restored, rows, run, untimed
from tests.train.test_processes import run_two_processes
from train import checkpoint, report, storage
from train.directory import Metrics
from train.hosts.watchdog import LOST
from utils import UserError
from weights import __main__ as weights_command

pytestmark = pytest.mark.extra("buckets")
KINDS = ("s3", "gs")
ALIKE = {  # the clients look for keys only on this machine
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
    "NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
}  # fmt: skip
HANDLER = http.server.BaseHTTPRequestHandler  # handler of both servers


def with_generations(honest):
    """A verb of GCS's emulator that names an object's generation and holds to the conditions asked for, as GCS does.

    Without them OCDBT cannot commit twice to a manifest that it has read: "Malformed StorageGeneration".
    Source: https://cloud.google.com/storage/docs/request-preconditions
    """

    def verb(request, response, server, *args, **kwargs):
        bucket, name = request.params["bucket_name"], request.params.get("object_id") or request.query["name"][0]
        generation_now = lambda: server.objects.get(bucket, {}).get(name, {}).get("generation", "0")
        generation, _ = generation_now(), request.data  # a body that is not read breaks the answer off
        if request.query.get("ifGenerationMatch", [generation]) != [generation]:
            response.status = http.HTTPStatus.PRECONDITION_FAILED
        elif request.query.get("ifGenerationNotMatch") == [generation]:
            response.status = http.HTTPStatus.NOT_MODIFIED
        else:
            honest(request, response, server, *args, **kwargs)
            response["x-goog-generation"] = generation_now()

    return verb


@pytest.fixture(scope="module")
def servers():
    """Start S3 and GCS emulators, with one bucket each, and set their addresses in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALIKE.items():
            patch.setenv(name, value)
        from gcp_storage_emulator.handlers import objects  # here, because they are extras and read the environment
        from gcp_storage_emulator.server import create_server
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        for verb in ("download", "_media_upload"):
            patch.setattr(objects, verb, with_generations(getattr(objects, verb)))
        patch.setattr(HANDLER, "log_message", lambda *_: None)
        patch.setattr(socketserver.BaseServer, "handle_error", lambda *_: None)  # a client that hangs up early
        s3, gcs = ThreadedMotoServer("127.0.0.1", 0, verbose=False), create_server("127.0.0.1", 0, in_memory=True)
        s3.start(), gcs.start()
        at_gcs = f"http://127.0.0.1:{gcs._api._httpd.server_port}"
        where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.get_host_and_port()[1]}",
                 "STORAGE_EMULATOR_HOST": at_gcs, "TENSORSTORE_GCS_HTTP_URL": at_gcs}  # fmt: skip
        for name, value in where.items():
            patch.setenv(name, value)
        for kind in KINDS:
            # A process keeps its connections, which may be to a server that was stopped, and the buckets of moto.
            fsspec.get_filesystem_class(kind).clear_instance_cache()
            found = bucket.file_system(f"{kind}://own")[0]
            if not found.exists("own"):
                found.mkdir("own")
        yield
        s3.stop(), gcs.stop()


@pytest.fixture(params=KINDS)
def place(request, servers, tmp_path, monkeypatch):
    """An unused address in a bucket, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "WAITS_S", (0, 0, 0))
    monkeypatch.setattr(files, "WAITS_S", (0, 0, 0))
    forget()
    yield f"{request.param}://own/{uuid.uuid4().hex}"
    forget()


@pytest.fixture
def asked(monkeypatch):
    """The requests that the servers get. They answer the next `asked.refuse` of them with 503."""

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
    """Forget what this process has cached."""
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
    """Catches shards assembled differently, unfinished work left in a bucket, and tokens that are made twice."""
    assert prepared(source, tmp_path / "here") == prepared(source, place) == 0
    system, root = bucket.file_system(place)
    there = {os.path.relpath(name, root): system.cat_file(name) for name in system.find(root)}
    assert there == {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} and len(there) > 5
    assert prepared(source, place) == check.main([place]) == 0
    said = capsys.readouterr().out
    assert f"{place} is complete: " in said and f"{place}: every shard matches the manifest" in said


def test_a_damaged_object_is_found(place, source, capsys):
    """Catches a check that trusts a bucket."""
    prepared(source, place)
    system, root = bucket.file_system(place)
    shard = f"{root}/train-00001.npy"
    system.pipe_file(shard, system.cat_file(shard)[:-1] + b"\xff")
    assert check.main([place]) == 2
    assert f"{place}/train-00001.npy has sha256 " in capsys.readouterr().err


def test_a_run_downloads_only_what_it_needs_into_its_cache(place, source, tmp_path, asked, monkeypatch):
    """Catches batches that differ from those of a disk, whole shards that are downloaded, and a cache that grows."""
    monkeypatch.setattr(bucket, "BLOCK_BYTES", 1024)
    prepared(source, tmp_path / "here"), prepared(source, place)
    monkeypatch.setattr(bucket.cache(), "limit_bytes", 9 * 1024)
    cfg = lambda path: preset("tiny", **{"data.path": str(path), "data.seq_len": 64, "data.batch_size": 3})
    asked.clear()
    for step in range(12):
        one, other = dataset.batch(cfg(place), step), dataset.batch(cfg(tmp_path / "here"), step)
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) <= 9 * 1024
    blocks = [span for _, path, span in asked if "train-" in path]
    assert len(blocks) > 20 and all(re.fullmatch(r"bytes=\d*0*-\d+", span or "") for span in blocks)
    sizes = {int(stop) - int(start) + 1 for start, stop in (span.removeprefix("bytes=").split("-") for span in blocks)}
    assert sizes == {1024}


def test_a_request_to_a_busy_server_is_retried_and_printed(place, source, asked, capsys):
    """Catches a client that retries without a message, and a single 503 that ends a command or a run."""
    asked.refuse = 2
    assert prepared(source, place) == 0
    # The GCS client requests a file and a folder of the same name together, so both refusals count as one.
    said = re.findall(rf"(?m)^{place}: .*(503|Service Unavailable).*; retrying in 0 s$", capsys.readouterr().out)
    assert 1 <= len(said) <= 2 and asked.refuse == 0
    corpus = dataset.load(place)
    asked.refuse = 2
    assert len(corpus.splits["train"].read(10, 90)) == 80
    said = re.findall(rf"data       {place}/train-00000.npy, .*(503|Service Unavailable).*; retrying in 0 s",
                      capsys.readouterr().out)  # fmt: skip
    assert len(said) == 2 and asked.refuse == 0


def test_a_missing_bucket_is_reported_at_once(place, source, capsys):
    """Catches a typo that creates a bucket, minutes of retries, and a client's own messages and tracebacks."""
    gone, begin = place.replace("own", "gone"), time.monotonic()
    assert prepared(source, gone) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"error: {gone}/.unfinished-units: the bucket does not exist (")
    assert not [line for line in lines if "Traceback" in line]
    with pytest.raises(UserError, match=rf"no tokens at '{gone}'"):
        dataset.load(gone)
    assert time.monotonic() - begin < 10 and not bucket.file_system(gone)[0].exists("gone")


@pytest.mark.parametrize("address", ["AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"])
def test_an_unreachable_server_ends_start_up_within_half_a_minute(servers, address, monkeypatch):
    """Catches a client that retries on its own, and our waits adding up to more."""
    kind = dict(zip(("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"), KINDS, strict=True))[address]
    monkeypatch.setenv(address, "http://127.0.0.1:9")  # nothing listens at the discard port
    assert sum(bucket.WAITS_S) <= 27 and sum(files.WAITS_S) <= 27
    monkeypatch.setattr(bucket, "WAITS_S", (0, 0))
    system = bucket.file_system(f"{kind}://own")[0]
    type(system).clear_instance_cache()
    asleep, sleep, fall_asleep = [], time.sleep, asyncio.sleep
    monkeypatch.setattr(time, "sleep", lambda s: asleep.append(s) or sleep(0))
    monkeypatch.setattr(asyncio, "sleep", lambda s, *more: asleep.append(s) or fall_asleep(0, *more))
    try:
        with pytest.raises(UserError, match=rf"{kind}://own/a/manifest\.json: .*[Cc]onnect.*; gave up after 3 "):
            dataset.load(f"{kind}://own/a")
        assert sum(asleep) < 2  # requested waits in seconds, however busy the machine is
    finally:
        type(system).clear_instance_cache()


def test_a_run_trains_and_resumes_with_tokens_in_a_bucket(servers, source, tmp_path, monkeypatch):
    """Catches losses that differ from those with local tokens, and a run that cannot resume."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = f"gs://own/{uuid.uuid4().hex}"
    schedule = "--optim.schedule wsd:0".split()  # the same for 5 steps and 8
    prepared(source, tmp_path / "here"), prepared(source, place)
    for tokens, runs, steps in ((tmp_path / "here", "a", 8), (place, "b", 5), (place, "b", 8)):
        status, _, complaint = run([*flags(tokens, tmp_path / runs), "--run.steps", str(steps), *schedule])
        assert status == 0, complaint
    losses = {}
    for runs in "ab":
        rows = map(json.loads, Path(tmp_path, runs, "small/metrics.jsonl").read_text().splitlines())
        losses[runs] = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    assert losses["b"] == losses["a"] and len(losses["a"]) == 8


# A run in a bucket ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of this process."""


@pytest.fixture
def home(servers, source, tmp_path, monkeypatch):
    """Flags of a short run that saves every second step; a later --run.dir counts."""
    prepared(source, tmp_path / "tokens")
    monkeypatch.setattr(bucket, "WAITS_S", (0, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = "--run.checkpoint_every 2 --run.steps 6".split()
    return [*flags(tmp_path / "tokens", "-"), *more]


def die_at(monkeypatch, step):
    """Make a process exit at a row of metrics and send nothing afterwards."""
    write = Metrics.write

    def write_or_die(self, kind, row_step, **values):
        if (kind, row_step) == ("train", step):
            monkeypatch.setattr(storage.BucketDirectory, "upload", lambda self: None)
            raise Killed
        write(self, kind, row_step, **values)

    monkeypatch.setattr(Metrics, "write", write_or_die)


def rows_at(address):
    text = bucket.file_system(address)[0].cat_file(f"{address}/metrics.jsonl").decode()
    return untimed([row for row in map(json.loads, text.splitlines()) if row["kind"] in ("train", "eval", "end")])


def test_a_run_in_a_bucket_equals_a_run_on_disk(home, tmp_path, monkeypatch, capsys):
    """Catches other numbers than on a disk, after a kill or on another machine, and a reader that needs a disk."""
    address, disk = f"gs://own/{uuid.uuid4().hex}/small", tmp_path / "runs" / "small"
    there, here = ([*home, "--run.dir", str(place)[: -len("/small")]] for place in (address, disk))
    assert run(here)[0] == 0
    with monkeypatch.context() as patch:
        die_at(patch, 5)
        with pytest.raises(Killed):
            run(there)
    assert checkpoint.latest_step(f"{address}/checkpoints") == 4
    assert [row["step"] for row in rows_at(address)] == [1, 2, 3, 4]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert run([*there, "--run.check", "only"])[1].endswith("resumes from step 4 of 6\n")
    status, out, complaint = run(there)
    assert (status, complaint) == (0, "") and f"resumed    at step 4 from {address}/checkpoints" in out
    assert rows_at(address) == untimed([row for row in rows(disk) if row["kind"] in ("train", "eval", "end")])
    assert f"{address} is complete: 6 of 6 steps taken" in run(there)[1]
    files = {Path(name).name for name in bucket.file_system(address)[0].ls(address, detail=False)}
    assert {"config.json", "metrics.jsonl", "saved", "samples.txt", "report.png", "checkpoints"} <= files
    for mesh in ("data=1", "fsdp=2,tensor=2"):
        ours, theirs = (sharding.flatten_named(restored(home, place, mesh)) for place in (disk, Address(address)))
        for name, x in ours.items():
            np.testing.assert_array_equal(theirs[name], x, err_msg=name)
    ours, theirs = (sharding.flatten_named(load(str(place)).params) for place in (disk, address))
    for name, x in ours.items():
        np.testing.assert_array_equal(theirs[name], x, err_msg=name)
    folders = [tmp_path / "slim-disk", tmp_path / "slim-bucket"]
    for place, folder in zip((disk, address), folders, strict=True):
        assert weights_command.main(["slim", str(place), str(folder)]) == 0
    numbers = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert numbers[0] == numbers[1]
    assert report.read_run(address).name == "small" and checkpoint.main(["verify", address]) == 0
    assert re.search(r"(?m)^ +6 .* good$", capsys.readouterr().out)


def test_ocdbt_retries_a_commit_on_another_generation(servers):
    """Catches an emulator without generations (a save on a busy machine needs them), or that ignores them."""
    import tensorstore as ts

    place = {"driver": "ocdbt", "base": f"gs://own/{uuid.uuid4().hex}/"}
    for name in ("a", "b"):
        ts.KvStore.open(place, context=ts.Context()).result().write(name, name.encode()).result()
    assert sorted(ts.KvStore.open(place, context=ts.Context()).result().list().result()) == [b"a", b"b"]
    here = ts.KvStore.open(place["base"]).result()
    read = here.read("manifest.ocdbt").result().stamp.generation
    first, second = (here.write("manifest.ocdbt", b"new", if_equal=read).result().generation for _ in range(2))
    assert first not in (b"", read) and second == b""  # the condition of the second one failed


def test_a_run_of_two_processes_in_a_bucket_resumes_after_a_kill(home, tmp_path):
    """Each process writes its part of every step; process 1 is killed while it saves the fourth. Catches an error that
    blames the bucket, an incomplete step that counts, and other numbers than one process on a disk gives."""
    address, disk = f"gs://own/{uuid.uuid4().hex}/small", tmp_path / "runs" / "small"
    words = [*home, "--run.checkpoint_every", "1", "--run.peer_timeout_s", "8", "--run.dir"]
    assert run([*words, disk.parent, "--mesh", "fsdp=2"])[0] == 0
    there = [*words, address.removesuffix("/small")]
    status, _, errors = run_two_processes(there, there, script="tests/launch/faulty.py")
    assert status == [LOST, -signal.SIGKILL], errors
    assert "error: process 1 on host01 has been silent for 8 s; it had reached step" in errors[0]
    good = checkpoint.latest_step(f"{address}/checkpoints")
    assert good in (2, 3)  # the third may still be in flight
    status, said, errors = run_two_processes(there, there)
    assert status == [0, 0] and f"resumed    at step {good} from {address}/checkpoints" in said[0], errors
    assert rows_at(address) == untimed([row for row in rows(disk) if row["kind"] in ("train", "eval", "end")])
    parts = bucket.file_system(address)[0].ls(f"{address}/checkpoints/6/state/params", detail=False)
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {Path(part).name for part in parts}


class Address(str):
    """Supports `/` like a Path."""

    def __truediv__(self, name):
        return f"{self}/{name}"


def save(address, steps, send=lambda: None, keep=9):
    """Save a small array at each step."""
    with checkpoint.Saver(address, keep=keep, send=send) as saver:
        for step in steps:
            checkpoint.save(saver, step, {"params": {"x": jax.numpy.full(1000, step)}}, {"by": "us"})


def test_only_an_unchanged_step_with_a_manifest_counts(servers, asked):
    """Catches a half-written step that is used or never deleted, a changed object, and a check that downloads all."""
    address = f"gs://own/{uuid.uuid4().hex}/checkpoints"
    save(address, [1, 2, 3, 4])
    system = bucket.file_system(address)[0]
    system.rm_file(f"{address}/4/manifest.json")
    damaged = max(system.find(f"{address}/3/state/params"), key=system.size)
    system.pipe_file(damaged, system.cat_file(damaged)[:-1] + b"?")
    asked.clear()
    said = []
    assert checkpoint.latest_step(address, said.append) == 2
    assert said[0] == f"skipped    {address}/4: left over from an interrupted save or deletion"
    assert re.fullmatch(rf"skipped    {address}/3: state/params/\S+ is damaged: its md5 differs .*", said[1])
    assert not [path for _, path, _ in asked if "state" in path and "alt=media" in path]
    save(address, [3])
    assert checkpoint.latest_step(address) == 3 and not system.exists(f"{address}/4")


def test_a_step_in_a_bucket_is_kept_forever(servers):
    """Catches a mark that only a disk can have, and a marked step that fails its verification."""
    address = f"gs://own/{uuid.uuid4().hex}"
    save(f"{address}/checkpoints", [1, 2])
    assert checkpoint.main(["keep", address, "1"]) == 0
    save(f"{address}/checkpoints", [3, 4], keep=1)
    rows = checkpoint.step_rows(f"{address}/checkpoints", "all")
    assert [(row.step, row.kept, row.fault) for row in rows] == [(4, False, None), (1, True, None)]


def test_the_last_process_to_start_owns_the_run(servers, tmp_path):
    """Catches two runs at one address that both continue, and one that takes the other's step for its own."""
    address = f"gs://own/{uuid.uuid4().hex}/small"
    first, second = (storage.BucketDirectory(address, tmp_path / name) for name in "ab")
    for run_there in (first, second):
        run_there.download()
        (run_there.local / "config.json").write_text(run_there.local.name)
        run_there.claim_ownership()
        run_there.upload()
    with pytest.raises(UserError, match=rf"{address} is now in use by process \d+ on .*; this process \(process \d+"):
        save(f"{address}/checkpoints", [1], first.upload)
    assert checkpoint.latest_step(f"{address}/checkpoints") is None
    save(f"{address}/checkpoints", [1], second.upload)
    first.download()
    assert checkpoint.latest_step(f"{address}/checkpoints") == 1 and (first / "config.json").read_text() == "b"


def test_a_refusal_of_a_bucket_is_reported(home, tmp_path, monkeypatch):
    """Catches a typo that creates a bucket, a traceback for a missing permission, and a step that counts afterwards."""
    status, _, complaint = run([*home, "--run.dir", "s3://own/runs"])
    message = "run.dir='s3://own/runs': use a directory on disk or gs://BUCKET/DIR, because Orbax"
    assert status == 2 and message in " ".join(complaint.split())
    for more in ([], ["--run.check", "only"]):
        status, _, complaint = run([*home, "--run.dir", "gs://gone/runs", *more])
        assert status == 2 and "error: gs://gone/runs/small: no bucket gs://gone; create it" in complaint
    assert not bucket.file_system("gs://gone")[0].exists("gone")
    address, honest, denied_of = f"gs://own/{uuid.uuid4().hex}", HANDLER.parse_request, "/upload/"

    def parse(self):
        if understood := honest(self):
            if denied := self.command == "POST" and denied_of in self.path.replace("%2F", "/"):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_error(403)
            return not denied
        return understood

    monkeypatch.setattr(HANDLER, "parse_request", parse)
    with pytest.raises(UserError, match=rf"^{address}/small/owner: PermissionError: Forbidden: [^\n]*$"):
        storage.BucketDirectory(f"{address}/small", tmp_path / "here").claim_ownership()
    denied_of = "/4/"
    status, _, complaint = run([*home, "--run.dir", address])
    assert status == 2 and "Traceback" not in complaint, complaint
    assert f"error: the checkpoint of step 4 cannot be written to {address}/small/checkpoints: " in complaint
    assert "the one of step 2 is good and remains" in complaint and "403" in complaint
    assert checkpoint.latest_step(f"{address}/small/checkpoints") == 2
