"""Tests that a batch is a pure function of settings and step, with no token lost, duplicated or mislabeled."""

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dataset
from config import first_difference, preset, replace
from data import prepare, units
from pipeline.step import BATCH_NAMES
from utils import UserError

B, T = 3, 7  # rows and positions of a batch
NAMES = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "weights_BT")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Make forty documents of 0 to 22 letters, so that none, one or several of them begin in a window."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for n in range(40):
        (folder / f"{n:02}.txt").write_bytes(rng.integers(97, 123, size=n * 7 % 23, dtype=np.uint8).tobytes())
    return folder


def prepared(texts, out, shard_tokens):
    args = prepare.Arguments(str(out), f"text:{texts}/*.txt", val_share=0.3, shard_tokens=shard_tokens)
    prepare.prepare(args)
    return str(out)


@pytest.fixture(scope="module")
def path(texts, tmp_path_factory):
    return prepared(texts, tmp_path_factory.mktemp("tokens"), shard_tokens=50)


@pytest.fixture
def own_path(texts, tmp_path):
    """A directory of shards that a test may damage."""
    return prepared(texts, tmp_path / "own", shard_tokens=50)


def config(path, **more):
    return preset("tiny", **{"data.path": path, "data.seq_len": T, "data.batch_size": B, **more})


def stream(texts, split="train"):
    """The tokens of a split, straight from the files."""
    files = [file for file in sorted(texts.iterdir()) if units.split_of(file.name, 0.3) == split]
    return [token for file in files for token in (256, *file.read_bytes())]


def window(tokens, start, mask_documents):
    """One row, by a slow loop."""
    row = {name: [] for name in NAMES}
    segment = position = 0
    for t in range(start, start + T):
        if t + 1 >= len(tokens):
            values = (256, 256, 0 if mask_documents else t - start, 0, 0.0)
        else:
            if t == start or tokens[t] == 256:
                segment, position = segment + 1, 0 if mask_documents or t == start else position
            values = (tokens[t], tokens[t + 1], position, segment, 1.0)
            position += 1
        for name, value in zip(NAMES, values, strict=True):
            row[name].append(value)
    return tuple(tuple(row[name]) for name in NAMES)


def windows(tokens, mask_documents):
    return [window(tokens, start, mask_documents) for start in range(0, len(tokens) - 1, T)]


def rows(batch):
    return [tuple(tuple(batch[name][row].tolist()) for name in NAMES) for row in range(B)]


def epoch(cfg, number, count, split="train"):
    """Rows number*count .. of the endless sequence of rows."""
    first, last = number * count, (number + 1) * count
    sequence = [row for step in range(first // B, -(-last // B)) for row in rows(dataset.batch(cfg, step, split))]
    return sequence[first - first // B * B :][:count]


def same(one, other):
    return set(one) == set(other) == set(NAMES) and all(np.array_equal(one[name], other[name]) for name in NAMES)


def test_a_batch_is_a_pure_function_of_settings_and_step(path):
    """Catches a hidden position, a shared buffer, or a stateful generator: a resumed run would see other data."""
    cfg = config(path)
    forwards = [dataset.batch(cfg, step) for step in range(20)]
    dataset._open.cache_clear()
    dataset._shuffled.cache_clear()
    backwards = [dataset.batch(cfg, step) for step in reversed(range(20))][::-1]
    assert all(map(same, forwards, backwards))
    assert not same(forwards[0], forwards[1])
    for name, values in forwards[0].items():
        assert values.shape == (B, T) and values.dtype == (np.float32 if name == "weights_BT" else np.int32), name


def test_a_batch_matches_its_documentation(path):
    """Catches an array that is missing in the docstring, for users who make their own batches, or has another dtype."""
    said = dict(re.findall(r"(?m)^ +(\w+_BT) +(int32|float32) ", dataset.batch.__doc__))
    batches = dataset.batch(config(path), 0), *dataset.evaluation_batches(config(path))
    assert {(name, str(x.dtype)) for batch in batches for name, x in batch.items()} == set(said.items())
    assert {x.shape for batch in batches for x in batch.values()} == {(B, T)}
    assert tuple(said) == BATCH_NAMES, "what training reads is not what is described"


@pytest.mark.parametrize("mask_documents", [True, False])
def test_every_window_comes_once_an_epoch(texts, path, mask_documents):
    """Catches lost or doubled windows, targets that are not the next tokens, wrong segments, positions or weights."""
    wanted = windows(stream(texts), mask_documents)
    assert len(wanted) % B, "an epoch here must end inside a batch"
    assert max(max(row[3]) for row in wanted) >= 3, "a window here must see several documents"
    assert any(0 in row[4] for row in wanted), "a window here must be padded"
    cfg = config(path, **{"data.packing": "windows" if mask_documents else "windows,unmasked"})
    for number in range(3):
        assert Counter(epoch(cfg, number, len(wanted))) == Counter(wanted)
    held_out = windows(stream(texts, "val"), mask_documents)
    assert Counter(epoch(cfg, 0, len(held_out), "val")) == Counter(held_out)


def test_epochs_and_seeds_differ_in_order(texts, path):
    """Catches a shuffle repeated in every epoch, a seed that is not used, and no shuffle at all."""
    wanted = windows(stream(texts), True)
    orders = [epoch(config(path), number, len(wanted)) for number in range(2)]
    orders += [epoch(config(path, **{"run.seed": 1}), 0, len(wanted)), wanted]
    assert len(set(map(tuple, orders))) == len(orders)


def test_the_shard_size_does_not_change_batches(texts, path, tmp_path):
    """Catches windows that end at a shard: another --shard-tokens would change the training run."""
    others = [config(prepared(texts, tmp_path / str(size), size)) for size in (9, 10_000)]
    assert len(dataset.load(path).splits["train"].shards) > 1
    for step in range(30):
        assert all(same(dataset.batch(config(path), step), dataset.batch(other, step)) for other in others)


def test_evaluation_counts_every_target_once(texts, path):
    """Catches a dropped last batch, padding that counts, or a changing order: losses would not be comparable."""
    cfg = config(path)
    batches = list(dataset.evaluation_batches(cfg))
    wanted = windows(stream(texts, "val"), True)
    got = [row for batch in batches for row in rows(batch)]
    assert got[: len(wanted)] == wanted
    assert len(wanted) % B, "the last batch here must need padding"
    assert len(got) % B == 0 and all(not any(row[4]) and not any(row[3]) for row in got[len(wanted) :])

    counted = np.concatenate([batch["targets_BT"][batch["weights_BT"] == 1] for batch in batches])
    assert counted.tolist() == stream(texts, "val")[1:]
    text_bytes = len(counted) * dataset.bytes_per_token(dataset.load(path), "val")
    assert text_bytes == pytest.approx(sum(token < 256 for token in stream(texts, "val")), abs=1e-9)


def test_a_short_evaluation_is_a_fixed_fair_sample(path):
    """Catches the first N batches instead of a sample, and a sample that changes with the training seed."""
    everything = [row for batch in dataset.evaluation_batches(config(path)) for row in rows(batch) if any(row[4])]
    some = [row for batch in dataset.evaluation_batches(config(path), 2) for row in rows(batch)]
    again = [row for batch in dataset.evaluation_batches(config(path, **{"run.seed": 5}), 2) for row in rows(batch)]
    assert some == again and len(some) == 2 * B
    assert not Counter(some) - Counter(everything)
    assert sorted(some) != sorted(everything[: 2 * B])
    more_than_there_is = [row for batch in dataset.evaluation_batches(config(path), 999) for row in rows(batch)]
    assert Counter(row for row in more_than_there_is if any(row[4])) == Counter(everything)


def test_a_late_step_is_as_cheap_as_the_first(path):
    """Catches a seek that reads all earlier batches: step 1,000,000 must make as many calls as step 0."""

    def calls(step):
        counted = 0

        def count(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            dataset.batch(config(path), step)
        finally:
            sys.setprofile(None)
        return counted

    calls(0)  # opens the shards and imports grain
    assert calls(1_000_000) <= 1.2 * calls(0)


def test_prefetched_batches_are_the_batches(path, monkeypatch):
    """Catches a step number off by one, a lost or duplicated batch, and a thread that does not end."""
    for depth in (0, 1, 4):
        threads = threading.active_count()
        cfg = config(path)
        monkeypatch.setattr(dataset, "AHEAD", depth)
        ahead = dataset.prefetch(cfg, start=11)
        for step in range(11, 31):
            got, batch = next(ahead)
            assert got == step and same(batch, dataset.batch(cfg, step))
        assert threading.active_count() == threads + 1
        ahead.close()
        assert threading.active_count() == threads


def test_prefetch_works_a_fixed_number_of_batches_ahead(path, monkeypatch):
    """Catches batches that are made only on demand, and a queue that grows without bound."""
    made, third = [], threading.Event()

    def batch(cfg, step, rows):
        made.append(step)
        if step == 5 + 3:
            third.set()
        return {}

    monkeypatch.setattr(dataset, "batch", batch)
    monkeypatch.setattr(dataset, "AHEAD", 3)
    ahead = dataset.prefetch(config(path), start=5)
    next(ahead)
    assert third.wait(timeout=5), "only one batch was asked for, three more should be under way"
    ahead.close()
    assert made == [5, 6, 7, 8]


def test_an_error_in_the_background_reaches_the_loop(path, monkeypatch):
    """Catches a training loop that waits forever for a batch of a dead thread."""
    threads = threading.active_count()
    real = dataset.batch

    def batch(cfg, step, rows):
        if step == 2:
            raise UserError("step 2 cannot be read")
        return real(cfg, step)

    monkeypatch.setattr(dataset, "batch", batch)
    ahead = dataset.prefetch(config(path), start=0)
    assert [next(ahead)[0], next(ahead)[0]] == [0, 1]
    with pytest.raises(UserError, match="step 2 cannot be read"):
        next(ahead)
    assert threading.active_count() == threads


def test_shards_are_opened_once(own_path):
    """Catches every batch opening every shard again, and a rewritten directory that is not noticed."""
    corpus = dataset.load(own_path)
    dataset.batch(config(own_path), 0)
    assert dataset.load(own_path) is corpus
    manifest = Path(own_path, "manifest.json")
    manifest.write_text(manifest.read_text() + " ")
    assert dataset.load(own_path) is not corpus


def test_missing_tokens_come_with_the_command_that_makes_them(tmp_path, monkeypatch):
    """Catches a bare FileNotFoundError on the first command a new user types, and the standard library suggested for a
    name that does not ask for it."""
    monkeypatch.chdir(tmp_path)
    for file in ("book.v2.txt", "rows.jsonl", "notes/a.md"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()
    for name, command in [
        ("tokens/stdlib-gpt2", "python -m data.prepare --source stdlib --tokenizer gpt2 --out tokens/stdlib-gpt2"),
        ("tokens/stdlib", "python -m data.prepare --source stdlib --tokenizer bytes --out tokens/stdlib"),
        ("my tokens/x", "python -m data.prepare --source 'text:FOLDER/*.txt' --out 'my tokens/x'"),
        ("book.v2.txt", "python -m data.prepare --source text:book.v2.txt --out tokens/book.v2"),
        ("rows.jsonl", "python -m data.prepare --source jsonl:rows.jsonl --out tokens/rows"),
        ("notes", "python -m data.prepare --source 'text:notes/**' --out tokens/notes"),
    ]:
        with pytest.raises(UserError) as error:
            dataset.batch(config(name), 0)
        assert str(error.value).splitlines() == [
            f"no tokens at {name!r} (it has no manifest.json); prepare them with",
            f"  {command}",
        ]
    Path("tokens/mine").mkdir(parents=True)
    Path("tokens/mine/manifest.json").touch()
    with pytest.raises(UserError, match=r"\(it has no manifest.json\); there are tokens/mine; or prepare them with"):
        dataset.batch(config("tokens/nope"), 0)


def test_tokens_that_do_not_fit_the_model_are_refused_with_numbers(texts, path):
    """Catches ids beyond the embedding table, which JAX clips silently, and a window longer than the text."""
    with pytest.raises(UserError, match=r"ids 0\.\.256, but model.vocab_size=256 allows 0\.\.255; use --model.vocab"):
        dataset.batch(config(path, **{"model.vocab_size": 256}), 0)
    dataset.batch(config(path, **{"model.vocab_size": 257}), 0)
    n = len(stream(texts, "val"))
    dataset.load(path, seq_len=n - 1)
    with pytest.raises(UserError, match=rf"'val' has {n} tokens, .* \+ 1 = {n + 1}; use --data.seq_len {n - 1} or"):
        dataset.batch(config(path, **{"data.seq_len": n}), 0)


def break_file(file: Path, how: str):
    contents = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "other dtype":
        np.save(file, np.load(file).astype(np.uint32))
    elif how == "fewer tokens":
        np.save(file, np.load(file)[:-1])
    else:
        file.write_bytes({"empty": b"", "truncated": contents[:-1], "longer": contents + b"\0"}[how])


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "longer", "other dtype", "fewer tokens"])
def test_a_shard_unlike_its_manifest_is_refused_by_name(own_path, how):
    """Catches training on a broken copy of the shards."""
    break_file(Path(own_path, "train-00001.npy"), how)
    with pytest.raises(UserError, match=r"shard .*train-00001\.npy (cannot be opened|has uint|has \d+ bytes)"):
        dataset.load(own_path)


def test_a_flipped_bit_is_found_by_verify(own_path):
    """Catches a verification that checks sizes only, or names no shard."""
    dataset.verify(own_path)
    shard = Path(own_path, "val-00001.npy")
    contents = bytearray(shard.read_bytes())
    contents[-5] ^= 1
    shard.write_bytes(contents)
    dataset.load(own_path)
    with pytest.raises(UserError, match=r"val-00001\.npy has sha256 [0-9a-f]{64}, but the manifest has"):
        dataset.verify(own_path)


def test_a_manifest_of_another_kind_is_refused(own_path):
    """Catches a later format read as if it were this one, and a cut-off manifest shown as a JSON traceback."""
    manifest = Path(own_path, "manifest.json")
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="has format 99, but this version reads 1"):
        dataset.load(own_path)
    manifest.write_text(whole[:100])
    with pytest.raises(UserError, match="is not JSON"):
        dataset.load(own_path)


def test_other_tokens_than_the_checkpoints_are_refused_by_name(texts, path, tmp_path):
    """Catches a run that resumes with another tokenizer or text."""
    ours = dataset.fingerprint(config(path))
    assert first_difference(ours, json.loads(json.dumps(ours))) is None
    retokenized = ours | {"tokenizer": ours["tokenizer"] | {"fingerprint": "x"}}
    assert first_difference(retokenized, ours).startswith("tokenizer.fingerprint is 'x' here and ")
    (tmp_path / "texts").mkdir()
    for file in texts.iterdir():
        (tmp_path / "texts" / file.name).write_bytes(file.read_bytes().replace(b"a", b"A"))
    other = dataset.fingerprint(config(prepared(tmp_path / "texts", tmp_path / "out", 50)))
    assert first_difference(other | {"source": ours["source"]}, ours).startswith("shards_sha256.train is ")


def test_reading_tokens_needs_no_jax():
    """Catches an import that would start JAX before the command line is parsed."""
    code = "import sys, dataset, data.prepare; sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(dataset.__file__).parent).returncode == 0


def test_settings_reach_the_batch_by_replace(path):
    """Catches a batch that caches the settings it was first called with."""
    cfg = config(path)
    dataset.batch(cfg, 0)
    assert dataset.batch(replace(cfg, **{"data.seq_len": T + 4}), 0)["tokens_BT"].shape == (B, T + 4)
