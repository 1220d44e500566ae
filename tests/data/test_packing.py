"""`--data.packing documents` packs whole documents into rows, each token once per epoch, kept apart by attention."""

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dataset
import model
import pipeline
import sharding
from config import preset, replace
from data import prepare
from data.reading import packing
from tests import helpers
from tests.data import test_hosts
from utils import UserError

B, T, EOT = 8, 14, 3000
GOLDEN = json.loads((Path(__file__).parent / "golden_batches.json").read_text())["documents"]


def documents(count, first=0):
    """Documents of 1 to 40 tokens, mostly short; every token has a unique id."""
    ends = first + np.cumsum(1 + (np.arange(count) * 97 % 211) ** 2 * 40 // 211**2)
    return np.split(np.arange(first, ends[-1]), ends[:-1] - first)


DOCUMENTS = documents(120)


def write_tokens(out, ids=DOCUMENTS, **more):
    more = {"validation_ids": ids[:9], "eot": EOT, "shard_tokens": 100, **more}
    prepare.from_ids(ids, str(out), vocab_size=EOT + 1, overwrite=True, **more)
    return str(out)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "drawn")


def config(path, **more):
    return preset("tiny", **{"data.path": path, "data.packing": "documents", "data.seq_len": T, "data.batch_size": B,
                             "model.vocab_size": EOT + 8, **more})  # fmt: skip


def pieces_of(ids):
    """Return the expected pieces of rows by a slow loop: inputs and targets of each document, cut every T."""
    stream = [token for one in ids for token in (EOT, *one.tolist())]
    begins = [n for n, token in enumerate(stream) if token == EOT] + [len(stream) - 1]
    for begin, end in itertools.pairwise(begins):
        for start in range(begin, end, T):
            stop = min(start + T, end)
            yield tuple(stream[start:stop]), tuple(stream[start + 1 : stop + 1])


def rows_of(cfg, steps):
    """Return the pieces of each row: tokens and targets of each segment. All else in a row is padding."""
    for step in steps:
        batch = dataset.batch(cfg, step)
        for tokens_T, targets_T, positions_T, segments_T, weights_T in zip(
            *(batch[f"{name}_BT"] for name in ("tokens", "targets", "positions", "segments", "weights")), strict=True
        ):
            real = np.count_nonzero(segments_T)
            assert set(weights_T[:real]) == {1} and not weights_T[real:].any() and not segments_T[real:].any()
            edges = [0, *(1 + np.flatnonzero(np.diff(segments_T[:real]))), real]
            assert segments_T[edges[:-1]].tolist() == [*range(1, len(edges))]
            pieces = []
            for start, stop in itertools.pairwise(edges):
                assert positions_T[start:stop].tolist() == [*range(stop - start)]
                pieces.append((tuple(tokens_T[start:stop].tolist()), tuple(targets_T[start:stop].tolist())))
            yield tuple(pieces)


# Best fit -------------------------------------------------------------------------------------------------------------


def rooms_by_hand(lengths, seq_len):
    """Return the room left in each row by a reference loop over all pieces and rows."""
    rooms = []
    for length in sorted(lengths.tolist(), reverse=True):
        room, row = min(((room, row) for row, room in enumerate(rooms) if room >= length), default=(seq_len, None))
        if row is None:
            rooms.append(room - length)
        else:
            rooms[row] -= length
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_equals_a_loop_over_all_rows(seed):
    """Catches a first or worst fit, rows that overflow, and a group of pieces placed differently from single pieces."""
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(1, 70))
    lengths = np.minimum(1 + rng.geometric(rng.uniform(0.02, 0.5), 300), seq_len)
    rooms = seq_len - np.bincount(packing.best_fit(lengths, seq_len), lengths)
    assert sorted(rooms) == rooms_by_hand(lengths, seq_len)


def test_the_number_of_numpy_calls_does_not_grow_with_the_text():
    """Catches a loop over documents: a million need at most twice the NumPy calls of ten thousand."""

    class Counted(np.ndarray):
        calls = 0

        def __getitem__(self, key):
            Counted.calls += 1
            return super().__getitem__(key)

    def calls(count):
        Counted.calls = 0
        lengths = np.minimum(1 + np.random.default_rng(0).exponential(300, count).astype(int), 1024)
        packing.best_fit(lengths.view(Counted), 1024)
        return Counted.calls

    assert 0 < calls(10**6) < 3 * calls(10**4) < 10**6


# Rows -----------------------------------------------------------------------------------------------------------------


def test_every_token_occurs_once_per_epoch_and_no_short_document_is_cut(path):
    """Catches documents lost, doubled or cut, targets from another document, and padding that has an effect."""
    cfg, wanted = config(path), Counter(pieces_of(DOCUMENTS))
    count = dataset.rows_of(dataset.open_corpus(cfg).splits["train"], cfg.data)
    assert count % B, "an epoch here must end inside a batch"
    rows = [*rows_of(cfg, range(3 * count // B + 1))]
    epochs = [rows[n * count : (n + 1) * count] for n in range(3)]
    for epoch in epochs:
        assert Counter(piece for row in epoch for piece in row) == wanted
    assert len({tuple(epoch) for epoch in epochs}) == 3 and len({frozenset(epoch) for epoch in epochs}) == 1
    assert sum(len(row) > 2 for row in rows) > 20 and any(tokens[0] != EOT for tokens, _ in wanted)
    targets = Counter(token for _, targets in wanted.elements() for token in targets)
    assert targets == Counter(np.concatenate(DOCUMENTS).tolist()) + Counter({EOT: len(DOCUMENTS) - 1})


def test_the_loss_of_rows_equals_that_of_separate_documents(path):
    """Catches attention to another document, positions that do not restart, and a last target that is lost."""
    cfg = config(path, **{"model.n_layers": 3})
    mesh, params = sharding.make_mesh("data=1"), helpers.draw(model.declare(cfg.model))
    compiled = pipeline.evaluate(cfg, mesh)
    of = lambda batch: [float(x) for x in compiled(params, sharding.put(batch, mesh))]
    alone, pieces = np.zeros(2), [piece for row in rows_of(cfg, [1]) for piece in row]
    assert len(pieces) > B, "rows here must hold several documents"
    for first in range(0, len(pieces), B):
        batch = {name: np.zeros((B, T), np.int32) for name in pipeline.step.BATCH_NAMES}
        batch["weights_BT"] = batch["weights_BT"].astype(np.float32)
        for row, (tokens, targets) in enumerate(pieces[first : first + B]):
            for name, values in {"tokens": tokens, "targets": targets, "positions": range(len(tokens)),
                                 "segments": 1, "weights": 1}.items():  # fmt: skip
                batch[f"{name}_BT"][row, : len(tokens)] = values
        alone += of(batch)
    np.testing.assert_allclose(of(dataset.batch(cfg, 1)), alone, rtol=1e-5)  # float32, in another order


def test_the_cut_into_shards_does_not_show(path, tmp_path):
    """Catches documents that end with a shard, and positions in a shard taken for positions in the stream."""
    others = [config(write_tokens(tmp_path / str(size), shard_tokens=size)) for size in (3, 10_000)]
    assert len(dataset.load(path).splits["train"].shards) > 10
    for step in range(12):
        one, *more = (dataset.batch(cfg, step) for cfg in (config(path), *others))
        assert all(np.array_equal(one[name], x) for other in more for name, x in other.items())


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_any_number_of_hosts_makes_the_same_rows_from_any_step_on(path, hosts):
    """Catches a packing that depends on the host or on earlier steps."""
    cfg, never_stopped = config(path), [dataset.batch(config(path), step) for step in range(25)]
    for step in np.random.default_rng(hosts).permutation(25):
        dataset.packed_rows.cache_clear()
        for devices in test_hosts.hosts_of(sharding.make_mesh("data=8"), hosts):
            rows = sharding.own_rows(sharding.make_mesh("data=8"), B, devices)
            made = dataset.batch(cfg, int(step), rows=rows)
            assert len(rows) == B // hosts
            assert all(np.array_equal(x, never_stopped[step][name][rows]) for name, x in made.items())
    skipped = dataset.batch(replace(cfg, **{"data.skip": "4:9"}), 3)
    assert np.array_equal(skipped["tokens_BT"], never_stopped[8]["tokens_BT"])


def test_the_rows_equal_the_stored_rows(path):
    """Any machine and version gives the same rows. Catches an unstable sort of equal lengths."""
    for step, sha256 in GOLDEN.items():
        assert test_hosts.digest(dataset.batch(config(path), int(step))) == sha256, step


def test_each_source_of_a_mixture_is_packed_separately(path, tmp_path):
    """Catches rows of two sources, and rows that depend on the other sources."""
    shutil.copytree(path, tmp_path / "one")
    write_tokens(tmp_path / "two", documents(60, first=2000))
    rows = [*rows_of(config(str(tmp_path), **{"data.mixture": "one=0.25,two=0.75"}), range(30))]
    of_two = [any(EOT > token >= 2000 for tokens, _ in row for token in tokens) for row in rows]
    assert all(two == all(max(t for t in tokens if t != EOT) >= 2000 for tokens, _ in row if {*tokens} != {EOT})
               for two, row in zip(of_two, rows, strict=True)) and sum(of_two) == 0.75 * len(rows)  # fmt: skip
    alone = [*rows_of(config(str(tmp_path), **{"data.mixture": "one=1,two=0"}), range(8))]
    assert [row for row, two in zip(rows, of_two, strict=True) if not two] == alone[: len(rows) // 4]


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_weights_follow_their_tokens(tmp_path, kind):
    """Catches weights by position in the row instead of the weights of the packed tokens."""
    weights = [one % 3 > 0 for one in DOCUMENTS]
    out = write_tokens(tmp_path / "own", train_weights=weights, validation_weights=weights[:9])
    cfg, seen = config(out if kind == "disk" else f"file://{out}"), 0
    for step in range(10):
        batch = dataset.batch(cfg, step)
        real, targets_BT = batch["segments_BT"] > 0, batch["targets_BT"]
        wanted = (targets_BT % 3 > 0) & (targets_BT != EOT) & real
        assert np.array_equal(batch["weights_BT"], wanted.astype(np.float32))
        seen += wanted.sum()
    assert seen > 300


def test_evaluation_reads_windows_whatever_the_packing(path):
    """Catches validation losses over different targets, which cannot be compared."""
    one, other = (
        [*dataset.evaluation_batches(config(path, **{"data.packing": kind}))] for kind in ("documents", "windows")
    )
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


# Positions of documents -----------------------------------------------------------------------------------------------


def test_tokens_of_an_earlier_version_are_scanned_or_refused(path, tmp_path):
    """Catches an older directory without document positions that cannot train, or that is downloaded as a whole."""
    old = Path(shutil.copytree(path, tmp_path / "old"))
    manifest = json.loads((old / "manifest.json").read_text())
    for row in (row for split in manifest["splits"].values() for row in split["shards"]):
        (old / row.pop("begins")["file"]).unlink()
    (old / "manifest.json").write_text(json.dumps(manifest))
    dataset.verify(str(old))
    for kind in ("windows", "documents"):
        new, scanned = (dataset.batch(config(str(where), **{"data.packing": kind}), 2) for where in (path, old))
        assert all(np.array_equal(new[name], x) for name, x in scanned.items())
    assert dataset.fingerprint(config(str(old))) == dataset.fingerprint(config(path)), "the tokens are the same"
    dataset.batch(config(f"file://{old}", **{"data.packing": "windows"}), 0)
    with pytest.raises(UserError, match=r"no index of document starts, .* or use --data.packing windows"):
        dataset.batch(config(f"file://{old}"), 0)


def test_a_bucket_gives_the_same_rows_from_its_position_files(path, monkeypatch):
    """Catches a scan of remote tokens."""
    read, honest = [], dataset.bucket.Shard.__getitem__
    monkeypatch.setattr(dataset.bucket.Shard, "__getitem__", lambda s, part: read.append(s.name) or honest(s, part))
    split = dataset.load(f"file://{path}").splits["train"]
    assert np.array_equal(split.document_edges(), dataset.load(path).splits["train"].document_edges())
    assert sorted(read) == [f"train-{n:05}.begins.npy" for n in range(len(split.shards))]
    same = [dataset.batch(config(where), 5) for where in (path, f"file://{path}")]
    assert all(np.array_equal(x, same[1][name]) for name, x in same[0].items())


# Messages -------------------------------------------------------------------------------------------------------------


def test_the_line_about_rows_is_right(path):
    """Catches a wrong share of cut documents or of padding."""
    split, lengths = dataset.load(path).splits["train"], [1 + len(one) for one in DOCUMENTS]
    lengths[-1] -= 1  # the last token has no target
    stream, rows = sum(lengths), len(packing.pack(split.document_edges(), T))
    ends = np.cumsum(lengths)
    longer, over_an_edge = np.greater(lengths, T).sum(), np.sum((ends - lengths) // T != (ends - 1) // T)
    padding = f", {1 - stream / rows / T:.2%} padding"
    for kind, count, cut, more in (
        ("documents", rows, longer, padding),
        ("windows", -(-stream // T), over_an_edge, ""),
    ):
        cfg, noun = config(path, **{"data.packing": kind}), "rows" if more else "windows"
        said = f"120 documents in {count} {noun} of 14 tokens; {cut / 120:.1%} of documents span several {noun}{more}"
        assert dataset.describe_epoch(split, cfg.data) == said
        assert dataset.epoch_steps(cfg) == {"": -(-count // B)}
    far = dataset.load(f"file://{path}").splits["train"]
    assert dataset.describe_epoch(far, cfg.data) == f"documents in {count} windows of 14 tokens", (
        "no file is read for it"
    )


@pytest.mark.parametrize("text", ["documents,ordered", "windows,shuffled", "windows,unmasked,ordered", ""])
def test_a_packing_that_cannot_be_parsed_is_refused(path, text):
    """Catches an option that is silently ignored."""
    with pytest.raises(UserError, match=f"data.packing='{text}': should be windows, windows,ordered or documents "):
        config(path, **{"data.packing": text})
