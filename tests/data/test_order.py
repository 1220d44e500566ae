"""The order of windows: a shuffle of the whole text, mixtures in exact shares, skipped batches, and epochs."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from scipy.stats import spearmanr

import dataset
import sharding
from config import preset, replace
from data import prepare
from train import directory, progress
from utils import UserError

B, T = 8, 5
SIZES = {"code": 300, "prose": 700, "maths": 45}  # tokens of each source; each has its own range of ids
FIRST = {"code": 0, "prose": 1000, "maths": 2000}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Three sources of consecutive ids, so that a batch shows which tokens were read."""
    home = tmp_path_factory.mktemp("tokens")
    for name, size in SIZES.items():
        ids = np.arange(FIRST[name], FIRST[name] + size)
        prepare.from_ids(ids, str(home / name), vocab_size=3000, validation_ids=ids[:20], shard_tokens=128)
    return str(home)


def config(path, mixture="", **more):
    return preset("tiny", **{"data.path": path, "data.mixture": mixture, "data.seq_len": T, "data.batch_size": B,
                             "model.vocab_size": 3001, **more})  # fmt: skip


def batches(cfg, steps):
    return [dataset.batch(cfg, step) for step in steps]


def sequences(cfg, steps):
    """Return the targets of each row, without padding."""
    made = batches(cfg, steps)
    return [tuple(t[w > 0].tolist()) for b in made for t, w in zip(b["targets_BT"], b["weights_BT"], strict=True)]


def source_of(sequence):
    return next(name for name in reversed(FIRST) if sequence[0] >= FIRST[name])


# The shuffle ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 141, 1000, 4096])
def test_each_epoch_is_a_permutation(count):
    """Catches a hash in place of a bijection, which loses and doubles windows, and one order for all epochs."""
    shuffled = dataset._shuffled(count, 7)
    epochs = [[shuffled[epoch * count + n] for n in range(count)] for epoch in range(3)]
    assert all(sorted(epoch) == [*range(count)] for epoch in epochs)
    assert count < 10 or len(set(map(tuple, epochs))) == 3


@pytest.mark.parametrize("mixture", ["", "code=0.3,prose=0.7"])
def test_without_a_shuffle_the_text_is_read_in_its_order(path, mixture):
    """Catches a shuffle that stays on, also for one source of a mixture, a window lost at the end of an epoch, and a
    seed that has an effect."""
    part = {} if mixture else {"data.path": f"{path}/prose"}
    cfg = config(path, mixture, **part, **{"data.packing": "windows,ordered"})
    read = {"code": [], "prose": []}
    for sequence in sequences(cfg, range(60)):
        read[source_of(sequence)] += sequence
    for name, targets in read.items():
        text = np.arange(FIRST[name], FIRST[name] + SIZES[name])
        assert np.array_equal(targets, np.resize(text, len(targets)))
    assert len(read["prose"]) > 2 * SIZES["prose"], "it went through the text twice"
    assert sequences(replace(cfg, **{"run.seed": 5}), range(60)) == sequences(cfg, range(60))


def test_a_sorted_text_comes_out_unsorted(tmp_path):
    """Catches a buffer in place of a global shuffle, which keeps neighbors of the text together. The limit is 5
    standard deviations of a rank correlation, 1 / sqrt(windows - 1)."""
    prepare.from_ids(np.arange(20_000), str(tmp_path / "sorted"), vocab_size=20_000, shard_tokens=3000)
    cfg = config(str(tmp_path / "sorted"), **{"model.vocab_size": 20_001})
    first = [s[0] for s in sequences(cfg, range(450))]
    bound = 5 / np.sqrt(len(first) - 1)
    assert abs(spearmanr(first, range(len(first))).statistic) < bound
    steps = np.diff(first)
    assert abs(spearmanr(first[:-1], first[1:]).statistic) < bound and np.median(abs(steps)) > 20_000 / 8
    buffered = [n + d for n, d in zip(range(3600), np.random.default_rng(0).integers(0, 512, 3600), strict=True)]
    assert spearmanr(buffered, range(3600)).statistic > 10 * bound, "the claim sees a buffer of 512"


def test_every_target_occurs_once_per_epoch(path):
    """Catches windows that omit tokens, or read them twice, at the end of the stream."""
    cfg = config(f"{path}/code", **{"data.seq_len": 7})
    count = dataset.open_corpus(cfg).splits["train"].windows(7)
    assert count % B and 300 % 7, "an epoch here must end inside a batch, and the last window be short"
    read = sequences(cfg, range(6 * count // B + 1))
    for epoch in range(6):
        targets = Counter(t for s in read[epoch * count : (epoch + 1) * count] for t in s)
        assert targets == Counter(range(300)), epoch


# Mixtures -------------------------------------------------------------------------------------------------------------

TWO = "code=0.7,prose=0.3,maths=0"


def test_shares_are_exact_over_any_thousand_sequences(path):
    """Catches shares that hold only on average, and sources that come in blocks."""
    found = [source_of(s) for s in sequences(config(path, "code=0.637,prose=0.338,maths=0.025"), range(400))]
    for start in range(0, len(found) - 1000, 7):
        assert Counter(found[start : start + 1000]) == {"code": 637, "prose": 338, "maths": 25}, start
    for start in range(len(found) - 40):
        assert abs(found[start : start + 40].count("code") - 40 * 0.637) <= 3


def test_each_source_is_shuffled_independently(path, tmp_path):
    """Catches a source whose order or epochs depend on the other sources, and one order for all sources."""
    for name in ("one", "two"):
        shutil.copytree(f"{path}/prose", tmp_path / name)
    twins = sequences(config(str(tmp_path), "one=0.5,two=0.5"), range(30))  # in turn
    assert sum(one == two for one, two in zip(twins[::2], twins[1::2], strict=True)) < 10
    alone = sequences(config(path, "code=1"), range(100))
    assert Counter(t for s in alone[:60] for t in s) == Counter(range(300))
    for mixture in (TWO, "prose=0.85,code=0.15"):
        mixed = [s for s in sequences(config(path, mixture), range(100)) if source_of(s) == "code"]
        assert mixed == alone[: len(mixed)]
    other = [s for s in sequences(config(path, TWO, **{"run.seed": 1}), range(100)) if source_of(s) == "code"]
    assert other[:60] != alone[:60] and sorted(other[:60]) == sorted(alone[:60])


def test_shares_change_at_a_step_and_nothing_is_lost(path):
    """Catches a change that restarts a source, comes a step early or late, or changes steps before it."""
    before = config(path, TWO)
    changed = config(path, f"{TWO}@101:code=0.1,prose=0.5,maths=0.4")  # step 101 of the log is number 100
    assert sequences(before, range(100)) == sequences(changed, range(100))
    after = sequences(changed, range(100, 240))
    assert Counter(map(source_of, after[:1000])) == {"code": 100, "prose": 500, "maths": 400}
    alone = sequences(config(path, "code=1"), range(100))
    of_code = [s for s in sequences(changed, range(100)) + after if source_of(s) == "code"]
    assert of_code == alone[: len(of_code)]


def test_a_mixture_is_a_function_of_the_step(path):
    """Catches counters that are stored between steps, and rows that a host cannot compute alone."""
    cfg = config(path, f"{TWO}@50:code=0.1,prose=0.5,maths=0.4", **{"data.skip": "20:25"})
    for step in (10**6, 49, 0, 50, 19):
        whole = dataset.batch(cfg, step)
        some = dataset.batch(cfg, step, rows=[1, 6])
        assert all(np.array_equal(some[name], whole[name][[1, 6]]) for name in whole)


def test_a_mixture_is_evaluated_on_all_its_sources(path):
    """Catches a validation loss of only the first source, and bits per byte with the bytes of other tokens."""
    cfg = config(path, TWO)
    counted = np.concatenate([b["targets_BT"][b["weights_BT"] > 0] for b in dataset.evaluation_batches(cfg)])
    assert {source_of([t]) for t in counted if t < 3000} == set(SIZES) and len(counted) == 3 * 21 - 1
    manifest = dataset.open_corpus(cfg).manifest
    of = {name: dataset.load(f"{path}/{name}").manifest["unigram_nats"] for name in SIZES}
    assert manifest["unigram_nats"] == pytest.approx(0.7 * of["code"] + 0.3 * of["prose"])
    assert set(dataset.fingerprint(cfg)["source"]) == set(SIZES)


@pytest.mark.parametrize("text, message", [
    ("code=0.7,prose=0.2", r"weights must add up to 1, but 0\.7 \+ 0\.2 = 0\.9"),
    ("code=0.3335,prose=0.6665", r"at most 3 decimals; use code=0\.334"),
    ("code", r"'code' should be NAME=WEIGHT, where NAME is a directory of tokens in data\.path"),
    ("code=0.5,code=0.5", "'code' is given twice"),
    ("code=1@1:code=1", "'1:code=1' should be STEP:NAME=WEIGHT,... with a later step"),
    ("code=1@50:prose=1", r"all phases \(separated by @\) must have the same names; use 0 if unused"),
])  # fmt: skip
def test_a_mixture_that_cannot_be_read_is_refused(path, text, message):
    """Catches shares that are silently scaled, and text that is misread."""
    with pytest.raises(UserError, match=message):
        config(path, text)


def test_sources_of_different_tokenizers_do_not_mix(path, tmp_path):
    """Catches ids with two meanings in one run."""
    for name, vocab_size in (("code", 3000), ("other", 2999)):
        prepare.from_ids(np.arange(100), str(tmp_path / name), vocab_size=vocab_size)
    with pytest.raises(UserError, match=r"were prepared with different tokenizers .*vocabulary 3001.*vocabulary 3000"):
        dataset.batch(config(str(tmp_path), "code=0.5,other=0.5"), 0)


# Skipped batches ------------------------------------------------------------------------------------------------------


def test_batches_are_skipped(path):
    """Catches a batch too many or too few, counting from 0 where the log counts from 1, and a second entry that shifts
    the first."""
    plain = config(f"{path}/prose")
    all_of_it = batches(plain, range(60))
    skipping = lambda text: batches(replace(plain, **{"data.skip": text}), range(30))
    tokens = lambda made: [b["tokens_BT"].tolist() for b in made]
    assert tokens(skipping("12:22")) == tokens(all_of_it[:11] + all_of_it[21:40])
    twice = tokens(skipping("12:22,20:21"))  # step 20 of the log under 12:22 is also bad
    assert twice == tokens(all_of_it[:11] + all_of_it[21:29] + all_of_it[30:41])
    assert tokens(skipping("20:21,12:22")) == twice


def written(path, cfg, tmp_path, monkeypatch, step):
    (tmp_path / "config.json").write_text(json.dumps(directory.describe(cfg)))
    monkeypatch.setattr(directory.checkpoint, "latest_step", lambda *_, **__: step)
    monkeypatch.setattr(directory.checkpoint, "find_difference", lambda *_, **__: None)
    return lambda **more: directory.check_same_settings(
        replace(cfg, **{f"data.{n}": x for n, x in more.items()}), tmp_path
    )


def test_a_resumed_run_may_change_only_later_steps(path, tmp_path, monkeypatch):
    """Catches a run that cannot skip a bad batch, and one that resumes although its past would change."""
    again = written(path, config(path, TWO), tmp_path, monkeypatch, step=100)
    again()
    again(skip="101:103", mixture=f"{TWO}@101:code=0,prose=0.5,maths=0.5")
    for name, value in (("skip", "100:103"), ("mixture", f"{TWO}@100:code=0,prose=0.5,maths=0.5"),
                        ("mixture", "code=0.6,prose=0.4,maths=0")):  # fmt: skip
        with pytest.raises(UserError, match=rf"data\.{name} was .* the 100 finished.* start after step 100"):
            again(**{name: value})


@pytest.mark.parametrize("limit", [0, 1])
def test_the_loss_of_each_source_is_reported(path, limit):
    """Catches a source that is left out, a row of another source, and a whole loss that is not over the same tokens."""
    cfg, mesh = config(path, "code=0.2,prose=0.3,maths=0.5", **{"data.seq_len": 7}), sharding.make_mesh("data=1")

    def id_as_loss(params, batch):  # so that the loss of a token is its id
        weights_BT = np.asarray(batch["weights_BT"])
        return np.sum(weights_BT * np.asarray(batch["targets_BT"])), weights_BT.sum()

    found = progress.evaluate(cfg, mesh, id_as_loss, None, limit)
    rows = dataset.rows_of(dataset.open_corpus(cfg).splits["val"], dataset.evaluation_data(cfg))
    order = dataset._shuffled(rows, dataset.EVALUATION_SEED) if limit else range(rows)
    text = [3000, *range(20), 3000, *range(1000, 1020), 3000, *range(2000, 2020)]  # 3000 begins a document
    wanted = {name: [] for name in SIZES}
    for row in (order[number] for number in range(min(rows, limit * B or rows))):
        wanted[list(SIZES)[row * 7 // 21]] += text[row * 7 + 1 : row * 7 + 8]
    assert len([name for name in wanted if wanted[name]]) > 1
    for name, targets in wanted.items():
        assert found.get(f"loss/{name}", 0) == pytest.approx(np.mean(targets or [0]), rel=1e-6), name
    every = [target for targets in wanted.values() for target in targets]
    assert (found["loss"], found["tokens"]) == (pytest.approx(np.mean(every), rel=1e-6), len(every))
    said = progress.format_result(found)
    assert all(f", loss/{name} {np.mean(targets):.3f}" in said for name, targets in wanted.items() if targets)
    assert "loss/" not in progress.format_result(progress.evaluate(config(f"{path}/code"), mesh, id_as_loss, None, 0))


# Epochs ---------------------------------------------------------------------------------------------------------------


def test_the_steps_of_an_epoch(path):
    """Catches an epoch with a window missing, and a source counted at another share than its own."""
    cfg = config(f"{path}/prose")
    assert dataset.epoch_steps(cfg) == {"": 18}  # ceil(140 windows / 8)
    read = Counter(t for s in sequences(cfg, range(35)) for t in s)
    assert read == Counter(dict.fromkeys(range(1000, 1700), 2))
    assert dataset.epoch_steps(config(path, TWO)) == {"code": 11, "prose": 59}
