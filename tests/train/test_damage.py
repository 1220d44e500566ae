"""A damaged file of a run or of its tokens gives a result or a one-line error that names it, and loses nothing."""

import copy
import json
import re

import numpy as np
import pytest

import dataset
import main
from bench import soak
from config import replace
from data import prepare
from startup import preflight
from tests.train.small_run import flags, run, snapshot, trained_steps
from train import report
from train.directory import SET_ASIDE, Metrics, check_resumable, missing_rows, read_lines
from utils import UserError

LINES = (b"garbage\n", b"\n", b"\0\0\0\0\n", b"\xff\xfe\n", b"5\n", b"[" * 100_000 + b"\n", b'{"step": 30}\n',
         b'{"kind": "train"}\n', b'{"kind": "train", "step": "30"}\n', b'{"kind": ["train"], "step": 30}\n',
         b'{"kind": "train", "step": 30, "lr": [], "loss": "low"}\n')  # fmt: skip
VALUES = (None, [], {}, "x", -1)


def result(function, *names):
    """Call a function. Its error, if any, must be a UserError that has one of these names."""
    try:
        return function()
    except UserError as error:
        found = error
    assert any(str(name) in str(found) for name in names) and "\n" not in str(found), found
    return found


def changes(values, at=()):
    """Yield (path, copy with the value at this path replaced or deleted) for every value in nested dicts and lists."""
    for name in values if isinstance(values, dict) else range(len(values)):
        for value in (*VALUES, "deleted"):
            changed = copy.deepcopy(values)
            if value == "deleted":
                del changed[name]
            else:
                changed[name] = value
            yield (*at, name, value), changed
        if isinstance(values[name], dict | list):
            for path, inner in changes(values[name], (*at, name)):
                yield path, copy.copy(values) | {name: inner} if isinstance(values, dict) else [
                    *values[:name], inner, *values[name + 1 :]]  # fmt: skip


@pytest.mark.parametrize("where", ["inserted", "replaced"])
@pytest.mark.parametrize("bad", LINES, ids=lambda line: repr(line[:30]))
def test_a_damaged_line_of_the_metrics_is_set_aside(partway, bad, where):
    """Catches a traceback, a report that does not name the line, and good rows that are lost with the damaged one."""
    argv, directory = partway
    cfg, file = main.parse(argv), directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    good = lines[:30] + lines[30 + (where == "replaced") :]
    file.write_bytes(b"".join(lines[:30] + [bad] + good[30:]))
    before = snapshot(directory)
    assert check_resumable(cfg, directory) is None
    assert not (missing_rows(directory, 49) or "").startswith("Traceback")
    assert [number for number, (_, row) in enumerate(read_lines(directory), 1) if isinstance(row, str)] == [31]
    assert f"{file}:31: " in str(result(lambda: report.read_run(directory), f"{file}:31: "))
    assert snapshot(directory) == before
    Metrics(directory, 49, 60)
    assert file.read_bytes() == b"".join(good) and (directory / SET_ASIDE).read_bytes() == bad
    assert check_resumable(cfg, directory) is None and report.read_run(directory)


def test_a_run_resumes_with_a_damaged_line(partway, straight):
    """Catches a run that cannot plot its report at the end, and one that stops at rows that will be set aside."""
    argv, directory = partway
    lines = (directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_bytes(b"".join([*lines[:9], b"\0\0\n", *lines[9:]]))
    status, out, err = run(argv)
    assert (status, err) == (0, "") and soak.differences(argv, directory, straight) == []
    assert f"set aside  {directory}/metrics.jsonl:10 is not JSON: '\\x00\\x00'\n" in out
    assert trained_steps(directory) == [*range(1, 61)] and (directory / SET_ASIDE).read_bytes() == b"\0\0\n"


@pytest.mark.parametrize("text", ["", "not json", "5", "[]", "{}", "[" * 100_000, '{"config": ' * 900 + "1" + "}" * 900,
                                  "\xff", '{"config": []}'], ids=lambda text: text[:20])  # fmt: skip
def test_a_config_json_of_another_form_loses_nothing(partway, text):
    """Catches a traceback, and advice to delete a good run."""
    argv, directory = partway
    file = directory / "config.json"
    file.write_text(text, encoding="latin-1")
    before = snapshot(directory)
    status, out, err = run(argv)
    assert (status, out) == (2, "") and err.startswith(f"error: {file} cannot be read (") and "nothing is lost" in err
    assert snapshot(directory) == before


def test_a_damaged_value_in_config_json_loses_nothing(partway):
    """Catches a value of another type: a traceback, or `started with other settings .. delete this one`, which is wrong
    because the checkpoint has the settings of the command."""
    argv, directory = partway
    cfg, file = main.parse(argv), directory / "config.json"
    written, found = json.loads(file.read_text()), []
    before = snapshot(directory / "checkpoints")
    for number, (path, changed) in enumerate(changes(written)):
        if len(path) > 3 and number % 5:  # every group, and a fifth of the settings
            continue
        file.write_text(json.dumps(changed))
        error = result(lambda: check_resumable(cfg, directory, "none"), file)
        if isinstance(error, UserError):
            found.append(json.dumps(path))
            assert "scratch" not in str(error) and "nothing is lost" in str(error), (path, error)
    assert snapshot(directory / "checkpoints") == before
    for path in (("config", "model", []), ("config", "run", -1), ("config", "mesh", "x"), ("config", "data", "deleted"),
                 ("data", "x")):  # fmt: skip
        assert json.dumps(path) in found, path


@pytest.fixture
def tokens(home, tmp_path):
    """A copy of the tokens in several shards, that a test may damage: the flags of a run on them, and their folder."""
    prepare.prepare(prepare.Arguments(str(tmp_path / "own"), f"text:{home}/texts/*.txt", val_share=0.3,
                                      shard_tokens=1500))  # fmt: skip
    return tmp_path / "own"


def test_a_damaged_manifest_is_refused_by_name(home, tokens):
    """Catches a traceback, at the start or at the first batch, and a shard file outside of the directory."""
    cfg = replace(main.parse(flags(home, tokens)), **{"data.path": str(tokens)})
    file, found = tokens / "manifest.json", {}
    whole = file.read_text()

    def start():
        preflight.check_tokens(cfg), dataset.fingerprint(cfg), dataset.batch(cfg, 0)
        corpus = dataset.open_corpus(cfg)
        return dataset.bytes_per_token(corpus), dataset.describe_epoch(corpus.splits["train"], cfg.data)

    start()
    for path, changed in changes(json.loads(whole)):
        file.write_text(json.dumps(changed))
        found[json.dumps(path)] = result(start, tokens, "unknown tokenizer 'x'")
    for text in ("", "5", "[]", "null", "[" * 100_000):
        file.write_text(text)
        found[text] = result(start, file)
    for place in ("../x", "/x", "a/b", "..", ""):
        file.write_text(whole.replace('"train-00001.npy"', json.dumps(place)))
        found[place] = result(start, file)
        assert f"splits.train.shards[1].file is {place!r}, which is not the name of a file" in str(found[place])
    for path in (("splits", "deleted"), ("splits", "val", "deleted"), ("dtype", "x"), ("tokenizer", "name", []),
                 ("tokenizer", "vocabulary", "x"), ("splits", "train", "shards", 1, "begins", "file", {})):  # fmt: skip
        assert f"{file} " in str(found[json.dumps(path)]), path


def test_ids_beyond_the_vocabulary_are_refused(home, tokens):
    """Catches ids that JAX clips silently, in a shard of the right size and type, in training and in validation."""
    cfg = replace(main.parse(flags(home, tokens)), **{"data.path": str(tokens)})
    for name, batches in (("train-00001", lambda: [dataset.batch(cfg, step) for step in range(20)]),
                          ("val-00000", lambda: [*dataset.evaluation_batches(cfg)])):  # fmt: skip
        batches()
        shard = tokens / f"{name}.npy"
        ids = np.load(shard)
        ids[7] = 60_000
        np.save(shard, ids)
        said = re.escape(f"shard {shard} has the token id 60000, but the vocabulary in manifest.json has 257; restore ")
        dataset._open.cache_clear()
        with pytest.raises(UserError, match=said):
            batches()


def test_documents_that_begin_in_another_order_are_refused(home, tokens):
    """Catches documents that are packed from wrong positions."""
    cfg = replace(main.parse(flags(home, tokens)), **{"data.path": str(tokens)})
    split = lambda: dataset.load(str(tokens)).splits["train"]
    dataset.describe_epoch(split(), cfg.data)
    file = tokens / "train-00001.begins.npy"
    begins = np.load(file)
    for wrong in (begins[::-1].copy(), begins + np.uint32(1500)):
        np.save(file, wrong)
        dataset._open.cache_clear()
        with pytest.raises(UserError, match=re.escape(f"shard {file} has positions that are not ascending, or not ")):
            dataset.describe_epoch(split(), cfg.data)  # as a run does when it starts
