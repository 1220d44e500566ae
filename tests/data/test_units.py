"""Work in units: results don't depend on the workers or on kills, and finished work is not repeated."""

import base64
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import dataset
from data import engine, prepare, shards, sources, units
from utils import UserError

ROOT = Path(__file__).parents[2]
UNITS = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A source of 8 units, seven of them in one file: distinct lines of words, of unequal length."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    with open(folder / "rows.jsonl", "w") as out:
        size = number = 0
        while size < (UNITS - 1.5) * sources.LEAST_UNIT_BYTES:
            number += 1
            text = f"{number} " + " ".join(rng.choices(("axis", "by", "mesh", "stage", "é"), k=rng.randrange(20, 9000)))
            size += out.write(json.dumps({"text": text}) + "\n")
    (folder / "a.jsonl").write_text('{"text": "the first"}\n')
    return f"jsonl:{folder}/*.jsonl"


def command(source, out, *words):
    more = ("--source", source, "--out", str(out), "--shard_tokens", "999983")
    return [sys.executable, "-m", "data.prepare", *more, *words]


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def right(corpus, tmp_path_factory):
    """The output of one process that is never interrupted."""
    out = tmp_path_factory.mktemp("right") / "tokens"
    manifest = prepare.prepare(prepare.Arguments(str(out), corpus, shard_tokens=999_983))
    assert [unit["parts"] for unit in manifest["units"]] == [2, *[1] * (UNITS - 2)], "the first holds two files"
    return files(out)


def finished_units(out: Path, pattern: str = "unit-*") -> list[Path]:
    return sorted(path for path in out.glob(f".unfinished-units/{pattern}") if path.suffix != ".part")


def kill_when(ready, source: str, out: Path, *words) -> None:
    """Start the command, and kill it, but not its workers, once it reaches a point."""
    with subprocess.Popen(command(source, out, *words), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not ready():
            time.sleep(0.001)
        process.kill()


def test_units_keep_the_order_of_the_documents(corpus, right, tmp_path):
    """Catches a document lost, doubled or moved where a file is split, and row numbers that restart at each split."""
    streams = {"train": [], "val": []}
    for document in sources.read_documents(corpus):
        streams[units.split_of(document.name, 0.05)] += [256, *document.text]
    manifest = json.loads(right["manifest.json"])
    for split, wanted in streams.items():
        path = tmp_path / "shard.npy"
        found = []
        for shard in manifest["splits"][split]["shards"]:
            path.write_bytes(right[shard["file"]])
            found.append(np.load(path))
        assert np.array_equal(np.concatenate(found), wanted)
        assert sum(unit[split] for unit in manifest["units"]) == len(wanted)
        assert manifest["splits"][split]["unique_tokens"] == len(set(wanted))


def test_shards_do_not_depend_on_the_number_of_processes(corpus, right, tmp_path):
    """Catches units assembled in the order in which they finish."""
    out = tmp_path / "tokens"
    subprocess.run(command(corpus, out, "--workers", "3"), cwd=ROOT, check=True, capture_output=True)
    assert files(out) == right


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.repeat)])
def test_a_kill_changes_no_shard_and_loses_only_unfinished_units(corpus, right, tmp_path, workers):
    """Catches work that restarts from the beginning after a kill, and half a file taken for a complete one."""
    out, words = tmp_path / "tokens", ("--workers", workers)
    kill_when(lambda: len(finished_units(out)) >= 3, corpus, out, *words)
    first = {path: path.stat().st_mtime_ns for path in finished_units(out)}
    assert 3 <= len(first) < UNITS and not (out / "manifest.json").exists()
    kill_when(lambda: len(finished_units(out, "*.npy")) >= 5, corpus, out, *words)
    assert {path: path.stat().st_mtime_ns for path in finished_units(out) if path in first} == first
    for n, path in enumerate([*finished_units(out), *finished_units(out, "*.npy"), *finished_units(out, "*.npy.json")]):
        if n % 3:  # as if the machine lost power
            os.truncate(path, (0, 20, path.stat().st_size // 2)[n % 3])
    subprocess.run(command(corpus, out, *words), cwd=ROOT, check=True, capture_output=True)
    assert files(out) == right


MOMENTS = [pytest.param(seed, marks=[pytest.mark.repeat] if seed > 2 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", MOMENTS)
def test_a_kill_at_any_moment_changes_no_shard(corpus, right, tmp_path, seed):
    """Catches moments that the test above misses, including a worker that outlives its command."""
    out, random_of = tmp_path / "tokens", random.Random(seed)
    moment, workers = time.monotonic() + random_of.uniform(0.4, 2), str(random_of.randrange(1, 3))
    kill_when(lambda: time.monotonic() > moment, corpus, out, "--workers", workers)
    subprocess.run(command(corpus, out), cwd=ROOT, check=True, capture_output=True)
    assert files(out) == right


class Killed(BaseException):
    """Stands for a kill: nothing runs after it."""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_step_of_publishing_is_safe(tmp_path, monkeypatch, overwrite):
    """Catches a directory taken for complete, or lost shards, after a kill between two renames."""
    for n in range(12):
        (tmp_path / f"{n}.txt").write_text(f"{n} some words " * 9)
    source = f"text:{tmp_path}/*.txt"
    arguments = lambda out, **more: prepare.Arguments(str(out), source, val_share=0.3, shard_tokens=300, **more)
    prepare.prepare(arguments(tmp_path / "right"))
    monkeypatch.setattr(prepare, "_remove_work", lambda out: None)  # and no cleanup after an error
    names = ("remove", "move_from", "write")
    whole = {name: getattr(shards.Folder, name) for name in names}
    for last in range(100):
        out, done = tmp_path / str(last), 0
        if overwrite:
            prepare.from_ids(np.arange(200), str(out), vocab_size=200, shard_tokens=10)  # more shards

        def step(name, last=last):
            def wrapped(*args):
                nonlocal done
                done += 1
                if done > last:
                    raise Killed
                return whole[name](*args)

            return wrapped

        for name in names:
            monkeypatch.setattr(shards.Folder, name, step(name))
        ended = True
        try:
            prepare.prepare(arguments(out, overwrite=overwrite))
        except Killed:
            ended = False
        for name in names:
            monkeypatch.setattr(shards.Folder, name, whole[name])
        if not ended:
            there = (out / "manifest.json").exists()
            assert not there or (overwrite and dataset.verify(str(out)) is None), "what was there is whole"
            prepare.prepare(arguments(out, overwrite=overwrite))
        wanted = files(tmp_path / "right")
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == wanted, last
        if ended:
            break
    assert last > 10, "a kill at each of many steps"


def test_a_changed_source_is_not_mixed_with_its_old_units(tmp_path, monkeypatch):
    """Catches units identified by number: after a kill, a corrected text would keep its old tokens."""
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 100)
    for n in range(9):
        (tmp_path / f"{n}.txt").write_text(f"{n} old words " * 8)
    make = lambda out: prepare.prepare(prepare.Arguments(str(tmp_path / out), f"text:{tmp_path}/*.txt", val_share=0.3))
    write = shards.write_unit

    def fails_at_the_fourth(*args):
        if len(finished_units(tmp_path / "a")) == 3:
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(shards, "write_unit", fails_at_the_fourth)
    with pytest.raises(OSError, match="No space left"):
        make("a")
    monkeypatch.setattr(shards, "write_unit", write)
    before = {path.name: path.stat().st_mtime_ns for path in finished_units(tmp_path / "a")}
    assert len(before) == 3
    (tmp_path / "0.txt").write_text("0 new words " * 8)
    monkeypatch.setattr(prepare, "_remove_work", lambda out: None)
    assert make("a") == make("b")
    after = {path.name: path.stat().st_mtime_ns for path in finished_units(tmp_path / "a")}
    assert len(before.items() & after.items()) == 2, "the two units of text that is as it was"
    monkeypatch.undo()
    prepare._remove_work(shards.Folder(str(tmp_path / "a")))
    prepare._remove_work(shards.Folder(str(tmp_path / "b")))
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("most_bytes, kept_units, name", [(50_000, 1, "unit-"), (150_000, 9, "train-00000")])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failed_write_is_not_a_finished_unit(tmp_path, monkeypatch, capfd, most_bytes, kept_units, name, workers):
    """Catches a truncated file taken for complete, an error that does not name it, and repeated work. The kernel's
    limit on the size of a file fails in the same call as a full disk."""
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 1000)
    for n in range(9):
        (tmp_path / f"{n}.txt").write_text(f"{n} some words, " * (2000 if n else 100))
    make = lambda out: prepare.main(["--source", f"text:{tmp_path}/*.txt", "--val_share", "0.3", "--workers", workers,
                                     "--shard_tokens", "100000", "--out", str(tmp_path / out)])  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        assert make("a") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr()
    assert re.search(rf"error: \[Errno 27\] File too large: '{tmp_path}/a/.unfinished-units/{name}\S*'\n$", said.err)
    there = {path.name: path.stat().st_mtime_ns for path in finished_units(tmp_path / "a")}
    assert len(there) == kept_units and not [*(tmp_path / "a").rglob("*.part"), *(tmp_path / "a").glob("*.json")]
    monkeypatch.setattr(prepare, "_remove_work", lambda out: None)
    assert make("a") == make("b") == 0
    assert there.items() <= {path.name: path.stat().st_mtime_ns for path in finished_units(tmp_path / "a")}.items()
    monkeypatch.undo()
    prepare._remove_work(shards.Folder(str(tmp_path / "a")))
    prepare._remove_work(shards.Folder(str(tmp_path / "b")))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_failed_run_leaves_no_partial_file(tmp_path):
    """Catches the file of a worker that is killed while it writes, because another worker has failed."""

    def fail():
        with prepare._work_folder(shards.Folder(str(tmp_path))) as work:
            for name in ("unit-1", "unit-2.77.part"):
                work.write(name, lambda file: file.write(b"tokens"))
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert [path.name for path in finished_units(tmp_path)] == ["unit-1"] and not [*tmp_path.rglob("*.part")]


def test_shards_of_another_size_are_not_reused(tmp_path, monkeypatch):
    """Catches shards identified by number: the units are the same, but shards change with --shard-tokens."""
    for n in range(12):
        (tmp_path / f"{n}.txt").write_text(f"{n} some words " * 9)
    make = lambda out, shard_tokens: prepare.prepare(
        prepare.Arguments(str(tmp_path / out), f"text:{tmp_path}/*.txt", val_share=0.3, shard_tokens=shard_tokens)
    )
    write = shards.write_shard

    def fails_at_the_third(folder, shard, tokens, eot):
        if shard.file == "train-00002.npy":
            raise OSError(28, "No space left on device")
        return write(folder, shard, tokens, eot)

    monkeypatch.setattr(shards, "write_shard", fails_at_the_third)
    with pytest.raises(OSError, match="No space left"):
        make("a", 400)
    monkeypatch.setattr(shards, "write_shard", write)
    assert len(finished_units(tmp_path / "a", "train-?????.npy")) == 2
    assert make("a", 300) == make("b", 300)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_text_that_is_refused_is_named_by_any_process(tmp_path):
    """Catches the traceback of a worker in place of the file and the byte."""
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([n])), n) for n in range(256))
    (tmp_path / "ranks.bpe").write_bytes(ranks)
    for n in range(3):
        (tmp_path / f"{n}.txt").write_bytes(b"words " * 400_000 + b"\xff" * (n == 2))
    words = ("--tokenizer", f"bpe:{tmp_path}/ranks.bpe", "--workers", "2")
    done = subprocess.run(
        command(f"text:{tmp_path}/*.txt", tmp_path / "out", *words), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "2.txt: byte 2400001, 0xff, is not UTF-8" in done.stderr
    assert "finished work is stored in" in done.stdout


def _dies(_shared, _task):
    os._exit(1)


def test_a_killed_worker_is_reported(tmp_path):
    """Catches a pool that hangs, or fails with a traceback, when the system kills a worker for lack of memory."""
    with pytest.raises(UserError, match=r"a worker process was killed, .* with fewer --workers"):
        list(engine.run(_dies, None, range(4), 2, "processes", ""))


def test_two_commands_cannot_use_one_folder(tmp_path):
    """Catches two commands that remove each other's files."""
    folder = shards.Folder(str(tmp_path))
    message = "another process is using this folder"
    with shards.lock_folder(folder), pytest.raises(UserError, match=message), shards.lock_folder(folder):
        pass
    with shards.lock_folder(folder):
        pass


def test_a_negative_number_of_workers_is_refused():
    """Catches a number that a pool would refuse with a traceback."""
    with pytest.raises(UserError, match=r"workers=-1: must be 0 \(one per core\) or more"):
        prepare.Arguments("out", workers=-1)


@pytest.mark.parametrize("shard_tokens", [1, 7, 20, 1000])
def test_shards_are_planned_like_a_reference(shard_tokens):
    """Catches a plan by cumulative sums that differs from one document after the other."""
    rng = np.random.default_rng(0)
    cut, shards_by_hand, held = shards.ShardPlanner("train", shard_tokens), [], []
    for unit in range(5):
        lengths = rng.integers(1, 30, rng.integers(0, 20))
        cut.add(unit, lengths)
        for document, length in enumerate(lengths):
            if held and len(held) + length > shard_tokens:
                shards_by_hand.append(held)
                held = []
            begin = int(lengths[:document].sum())
            for n in range(length):
                if len(held) == shard_tokens:
                    shards_by_hand.append(held)
                    held = []
                held.append((unit, begin + n))
    cut.close()
    found = [[(p.unit, n) for p in shard.pieces for n in range(p.start, p.stop)] for shard in cut.shards]
    assert found == [*shards_by_hand, held]
    assert [shard.tokens for shard in cut.shards] == [len(one) for one in found]


MEASURED = """
import resource, sys
from data import prepare
prepare.COUNTED_TOKENS = 2**16
status = prepare.main(sys.argv[1:])
assert status == 0
print(*(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def test_memory_is_bounded_by_the_workers_not_by_the_corpus(tmp_path):
    """Catches documents, units or lengths that stay in memory: ten times the text must not take more."""
    peaks = []
    for times in (1, 10):
        source = tmp_path / f"{times}.jsonl"
        with open(source, "w") as file:
            for n in range(1500 * times):
                file.write(json.dumps({"text": f"{n:04}" * 2**10}) + "\n")  # 4 KiB each, 6 MiB in all, then 60
        words = ["--source", f"jsonl:{source}", "--out", str(tmp_path / str(times)), "--shard-tokens", str(2**20)]
        done = subprocess.run([sys.executable, "-c", MEASURED, *words, "--workers", "2"], cwd=ROOT, check=True,
                              capture_output=True, text=True)  # fmt: skip
        peaks.append([int(kib) for kib in done.stdout.splitlines()[-1].split()])
    units_made = len(json.loads((tmp_path / "10" / "manifest.json").read_text())["units"])
    assert units_made > 25, "several for each worker"
    (command_kib, worker_kib), (command_10_kib, worker_10_kib) = peaks
    assert command_10_kib - command_kib < 6 * 1024 and worker_10_kib - worker_kib < 6 * 1024, peaks
