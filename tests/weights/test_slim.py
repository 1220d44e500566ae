"""`slim` exports the weights of a checkpoint, other commands read them, and nothing half-written is ever read. Both in
a local folder and in a bucket."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
import safetensors.numpy

import generate
import model
import sharding
from config import Config, preset, replace
from generate import cache
from generate.runs import open_run
from tests.helpers import draw
from train import checkpoint
from weights import convert, folders, init_from
from weights.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests/weights/fixtures/llama"
CFG = preset("tiny", **{"model.moe_every": 1, "model.no_rope_every": 0})  # a shape that to-hf can write
DATA = {"source": "text:/home/someone/mine", "tokenizer": {"name": "bytes", "fingerprint": "", "vocabulary": 257}}


def command(*argv) -> int:
    return main([str(word) for word in argv])


def params(seed):
    return sharding.flatten_named(draw(model.declare(CFG.model), seed))


def served(directory) -> bool:
    """Return whether `generate` opens the parameters of step 12."""
    want = cache.unstack(draw(model.declare(CFG.model), 12), CFG.model, sharding.make_mesh("", jax.devices()[:1]))
    return equal(sharding.flatten_named(generate.load(str(directory)).params), sharding.flatten_named(want))


def rows():
    return [{"kind": "train", "step": step, "loss": 1 + 1 / step, "tokens": 100 * step} for step in (3, 12, 15)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training run with checkpoints of steps 3 and 12, including moments."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    with checkpoint.Saver(run / "checkpoints") as saver:
        for step in (3, 12):
            tree = jax.tree.map(jax.numpy.asarray, draw(model.declare(CFG.model), step))
            checkpoint.save(saver, step, {"params": tree, "moments": tree, "step": jax.numpy.int32(step)}, about={})
    (run / "config.json").write_text(json.dumps({"config": CFG.to_dict(), "data": DATA}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()) + '{"kind": "tr')
    return run


@pytest.fixture
def bucket():
    """A folder in memory that works like a bucket: an address, without renaming."""
    fsspec.filesystem("memory").pipe("/bucket/other", b"stays")
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def tensors_of(folder) -> dict:
    """Read with the safetensors library instead of our reader."""
    return {
        name: x for file in Path(folder).glob("*.safetensors") for name, x in safetensors.numpy.load_file(file).items()
    }


def equal(got: dict, want: dict) -> bool:
    same = lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return set(got) == set(want) and all(same(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "dtype, flags, step", [("float32", [], 12), ("bfloat16", ["--dtype", "bfloat16", "--step", 3], 3)]
)
def test_slim_writes_only_the_parameters_of_the_step(dtype, flags, step, run, tmp_path, capsys, monkeypatch):
    """Catches moments written too, another step's parameters, a cast that was not requested, and a part missing where a
    parameter is written in parts."""
    monkeypatch.setattr(convert, "BLOCK_BYTES", 2000)  # less than one layer of some parameters
    monkeypatch.setattr(folders, "FILE_BYTES", 50_000)
    assert command("slim", run, tmp_path / "slim", *flags) == 0
    want = {name: x.astype(folders.NUMPY[dtype]) for name, x in params(step).items()}
    assert equal(tensors_of(tmp_path / "slim"), want)
    files = list((tmp_path / "slim").glob("model-*-of-*.safetensors"))
    index = json.loads((tmp_path / "slim/model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"]) == set(want)
    count, size = sum(x.size for x in want.values()), sum(file.stat().st_size for file in files)
    itemsize = folders.NUMPY[dtype].itemsize
    line = f"bytes      {size:,} = {count:,} x {itemsize} of tensor data + {size - count * itemsize:,} of headers\n"
    assert capsys.readouterr().out.endswith(line)


def test_other_commands_read_an_exported_folder(run, tmp_path):
    """Catches a folder that generate, --init-from, to-hf or slim itself cannot read."""
    slim = tmp_path / "slim"
    assert command("slim", run, slim) == 0
    want = params(12)
    assert served(slim)
    cfg = replace(CFG, **{"run.init_from": str(slim)})
    assert equal(sharding.flatten_named(init_from.load_init_params(cfg, sharding.make_mesh("fsdp=2,tensor=2"))), want)
    for source, out in ((run, "from_run"), (slim, "from_slim")):
        assert command("to-hf", source, "--out", tmp_path / out) == 0
    assert equal(tensors_of(tmp_path / "from_slim"), tensors_of(tmp_path / "from_run"))
    assert command("slim", slim, tmp_path / "again") == 0
    again = [(folder / "config.json").read_text() for folder in (slim, tmp_path / "again")]
    assert again[0] == again[1] and equal(tensors_of(tmp_path / "again"), want)


@pytest.fixture
def measured(run, tmp_path):
    """A run with three checkpoints and their validation losses: step 12 is the best, step 15 the newest."""
    measured = tmp_path / "run"
    with checkpoint.Saver(measured / "checkpoints", keep=3) as saver:
        for step, loss in ((3, 2.0), (12, 1.5), (15, 1.75)):
            tree = jax.tree.map(jax.numpy.asarray, draw(model.declare(CFG.model), step))
            checkpoint.save(saver, step, {"params": tree}, about={}, loss=loss)
    (measured / "config.json").write_text((run / "config.json").read_text())
    return measured


NO_STEP_7 = "has no checkpoint of step 7; use one of 3, 12, best, 15\n"


def test_a_step_is_selected_by_number_or_as_the_best(measured, tmp_path, capsys):
    """Catches a command that ignores the flag, the newest step taken for the best, and an error that does not list the
    existing steps."""
    opened = lambda step: open_run(str(measured), step=step)
    assert [opened(step).step for step in ("3", "best", "")] == [3, 12, 15]
    assert equal(sharding.flatten_named(opened("3").params), params(3)) and opened("3").digest != opened("best").digest
    for words in (["slim", measured, tmp_path / "slim"], ["to-hf", measured, "--out", tmp_path / "hf"]):
        assert command(*words, "--step", "best") == 0
    assert equal(tensors_of(tmp_path / "slim"), params(12))
    assert "| steps | 12 of " in (tmp_path / "hf/README.md").read_text()
    assert command("to-hf", measured, "--out", tmp_path / "x", "--step", "last") == 2
    said = f"error: {measured} {NO_STEP_7.replace('step 7', 'step last')}"
    assert capsys.readouterr().err.endswith(said)
    assert command("slim", tmp_path / "slim", tmp_path / "x", "--step", "12") == 2
    assert "slim has exported weights but no checkpoints; omit --step" in capsys.readouterr().err


@pytest.mark.parametrize("room, flags", [
    ("generate", []), ("evaluate", ["--perplexity", "x"]),
    pytest.param("serve", ["--port", "0"], marks=pytest.mark.extra("serve")),
])  # fmt: skip
def test_a_command_refuses_a_missing_step(room, flags, measured, capsys):
    """Catches a command that uses another checkpoint than requested, or does not list the existing ones."""
    assert importlib.import_module(f"{room}.__main__").main([str(measured), "--step", "7", *flags]) == 2
    assert capsys.readouterr().err.endswith(f"error: {measured} {NO_STEP_7}")


def test_a_bucket_works_like_a_folder(run, bucket, tmp_path):
    """Catches an address taken for a local path (gs:/bucket), and bytes from the wrong offset of a file."""
    for source, out in ((run, f"{bucket}/slim"), (f"{bucket}/slim", f"{bucket}/again")):
        assert command("slim", source, out) == 0
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    far = convert.load_params(f"{bucket}/again", model.declare(CFG.model), mesh)
    assert equal(sharding.flatten_named(far), params(12))
    assert convert.read_config(f"{bucket}/slim") == CFG.model
    assert served(f"{bucket}/slim")

    fsspec.filesystem("memory").put(f"{LLAMA}/", "/bucket/llama/", recursive=True)
    assert command("from-hf", f"{bucket}/llama", "--out", f"{bucket}/ours") == 0
    about = json.loads(fsspec.filesystem("memory").cat("/bucket/ours/config.json"))
    assert (about["config"]["run"]["name"], about["config"]["run"]["dir"]) == ("ours", Config().run.dir)
    assert command("to-hf", f"{bucket}/ours", "--out", f"{bucket}/hf") == 0
    fsspec.filesystem("memory").get("/bucket/hf/", f"{tmp_path}/hf/", recursive=True)
    assert equal(tensors_of(tmp_path / "hf"), tensors_of(LLAMA))


def test_a_slice_of_a_remote_array_is_right(bucket):
    """Catches offset arithmetic that is right only for whole arrays."""
    want = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    folder = folders.Folder(bucket)
    before = folders.Tensor("before", (7,), "bfloat16", lambda: [np.zeros(7, folders.NUMPY["bfloat16"])])
    folders.write_file(folder, "model.safetensors", [before, folders.Tensor("x", want.shape, "float32", lambda: want)])
    got = folders.Tensors(folder).arrays["x"]
    for index in (np.s_[()], np.s_[1,], np.s_[1, 2], np.s_[1, 2, 3, 4], np.s_[1:2], np.s_[0, 1:3], np.s_[:1, 2:3, 1:],
                  np.s_[:, :, :, 2:4]):  # fmt: skip
        assert np.array_equal(got[index], want[index]), index


class Full:
    """A file on a disk with this many free bytes."""

    def __init__(self, file, room: int, error: BaseException):
        self.file, self.room, self.error = file, room, error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise self.error
        return self.file.write(data)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("words", [["slim"], ["to-hf", "--out"], ["from-hf", "--out"]])
def test_an_interrupted_export_leaves_nothing(words, error, far, run, bucket, tmp_path, monkeypatch, capsys):
    """Catches half a folder that loads, and a full disk that ends in a traceback or stays full."""
    opened = folders.Folder.open
    monkeypatch.setattr(folders.Folder, "open", lambda folder, name: Full(opened(folder, name), 60_000, error))
    out = f"{bucket}/out" if far else tmp_path / "out"
    source = LLAMA if words[0] == "from-hf" else run
    status, said = command(words[0], source, *words[1:], out), capsys.readouterr().err
    if isinstance(error, OSError):
        assert status == 2 and said.startswith(f"error: cannot write {out}: No space left on device")
        assert said.count("\n") == 1 and said.endswith("; the partial folder was deleted\n")
    else:
        assert status == 130
    assert not list(tmp_path.iterdir()) and fsspec.filesystem("memory").find("/bucket") == ["/bucket/other"]


def test_a_disk_that_is_too_small_is_reported_before_writing(run, tmp_path, monkeypatch, capsys):
    """Catches an hour of writing that cannot succeed."""
    usage = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(folders.Folder, "open", lambda folder, name: pytest.fail(f"{name} is begun"))
    assert command("slim", run, tmp_path / "out", "--dtype", "bfloat16") == 2
    need = sum(x.size for x in params(12).values()) * 2 / 1e6
    said = f"error: {tmp_path}/out: {need:,.1f} MB to write, but only 0.0 MB are free; "
    assert capsys.readouterr().err.startswith(said) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["slim"], ["to-hf", "--out"]])
def test_config_json_is_written_last(words, run, bucket, monkeypatch):
    """A kill cannot be caught. Catches a bucket that has config.json without all of the weights."""
    opened, names = folders.Folder.open, []
    monkeypatch.setattr(folders.Folder, "open", lambda folder, name: names.append(name) or opened(folder, name))
    assert command(words[0], run, *words[1:], f"{bucket}/out") == 0
    assert names[-1] == "config.json" and names.count("config.json") == 1 and "model.safetensors" in names


MISTAKES = {
    "a far checkpoint": (["slim", "memory://bucket/run", "OUT"], "memory://bucket/run has no exported weights "),
    "no weights": (["slim", "EMPTY", "OUT"], "error: no checkpoint in "),
    "no folder": (["slim", "nowhere", "OUT"], "nowhere: no config.json; pass a run directory"),
    "theirs": (["slim", LLAMA, "OUT"], f"Hugging Face, convert it: python -m weights from-hf {LLAMA} --out runs/NAME"),
    "a model's name": (["slim", "org/model-8b", "OUT"], "org/model-8b: no config.json; pass a run directory, such as "
                       "runs/laptop; if org/model-8b is a model of Hugging Face, download its folder yourself, because "
                       "nothing here downloads weights, then run python -m weights from-hf FOLDER --out runs/NAME"),
    "a model's name to convert": (["from-hf", "org/model-8b", "--out", "OUT"], "org/model-8b/config.json does not exist"
                                  "; if org/model-8b is a model of Hugging Face, download its folder yourself"),
    "without --out": (["from-hf", "org/model-8b", "OUT"], "from-hf needs --out: python -m weights from-hf org/m"),
    "another dtype": (["slim", "RUN", "OUT", "--dtype", "int8"], "--dtype int8 is not supported; known: float32"),
    "near": (["slim", "RUN", "OUT", "--dtype", "bfloat"], "did you mean 'bfloat16'?"),
    "no step": (["slim", "RUN", "OUT", "--step", "7"], "has no checkpoint of step 7; use one of 3, 12"),
    "there": (["slim", "RUN", "RUN"], "exists; choose another folder, or delete it"),
    "there, far": (["slim", "RUN", "memory://bucket"], "memory://bucket exists; choose another folder, or delete it"),
    "no scores": (["slim", "RUN", "OUT", "--scores", "nowhere.json"], "--scores nowhere.json: No such file or di"),
    "another family": (["to-hf", "RUN", "--out", "OUT", "--family", "llama"], "ForCausalLM (llama) cannot express "),
    "no protocol": (["slim", "RUN", "nosuch://x/y"], "nosuch"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_line(mistake, run, bucket, tmp_path, capsys):
    """Catches a traceback, and output that is begun before the arguments are checked."""
    words, message = MISTAKES[mistake]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text((run / "config.json").read_text())
    places = {"RUN": run, "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    far = fsspec.filesystem("memory")
    far.put(str(run / "config.json"), "/bucket/run/config.json")
    assert command(*(places.get(word, word) for word in words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert far.find("/bucket") == ["/bucket/other", "/bucket/run/config.json"]


MEASURED = """
import sys, tempfile, threading
import jax
from weights import convert
from weights.__main__ import main

def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], held())

jax.config.update("jax_platforms", "cpu")
jax.devices()
main(["slim", sys.argv[1], tempfile.mkdtemp() + "/first"])  # a small run first, so that lazy imports are done
convert.BLOCK_BYTES, done, before = 2**21, threading.Event(), held()
peak = [before]
thread = threading.Thread(target=watch)
thread.start()
status = main(sys.argv[2:])
done.set()
thread.join()
print("peak", status, peak[0] - before)
"""
ALLOWED = 1 / 8  # of 6 billion float32 parameters, 24 GB: 3 GB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux does")
def test_memory_does_not_grow_with_the_model(run, tmp_path, monkeypatch):
    """203 MB in seven parameters of 29 MB. Catches a conversion that holds the model, a file of it, or a parameter."""
    dense = {"model.n_experts": 0, "model.attention": "gqa", "model.dense_prefix": 0, "model.balance_rate": 0.0,
             "model.moe_every": 1, "model.no_rope_every": 0}  # fmt: skip
    shape = dict(d_model=256, n_layers=28, n_heads=4, n_kv_heads=4, d_head=256, d_ff=1024, vocab_size=64)
    cfg = replace(CFG, **dense, **{f"model.{name}": value for name, value in shape.items()})
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 2**20)
    rng, large = np.random.default_rng(0), tmp_path / "run"
    draw_one = lambda d: jax.numpy.asarray(rng.random(d.shape, np.float32))
    tree = jax.tree.map(draw_one, model.declare(cfg.model))
    total = sum(x.nbytes for x in jax.tree.leaves(tree))
    assert 200e6 < total < 210e6
    with checkpoint.Saver(large / "checkpoints") as saver:
        checkpoint.save(saver, 2, {"params": tree}, about={})
    del tree
    (large / "config.json").write_text(json.dumps({"config": cfg.to_dict(), "data": None}))

    def peak(*argv) -> float:
        words = [sys.executable, "-c", MEASURED, run, *argv]
        done = subprocess.run(
            words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        _, status, found = next(line for line in done.stdout.splitlines() if line.startswith("peak")).split()
        assert status == "0", done.stderr
        return int(found)

    for argv in (["to-hf", large, "--out", tmp_path / "hf"], ["slim", large, tmp_path / "slim", "--dtype", "bfloat16"],
                 ["from-hf", tmp_path / "hf", "--out", tmp_path / "back"]):  # fmt: skip
        assert peak(*argv) < ALLOWED * total, argv
