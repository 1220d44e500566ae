"""`from_ids` writes token ids to a directory like any other, or names the position of a mistake."""

import doctest
import json
import math

import numpy as np
import pytest

import dataset
import generate
from config import preset, replace
from data import prepare, tokenizers, units
from data.prepare import from_ids, from_texts
from tests.data.test_prepare import write_ranks
from tests.test_training import rows, run
from utils import UserError


def streams(out):
    """Return the tokens of every split, as training reads them."""
    return {name: split.read(0, split.tokens).tolist() for name, split in dataset.load(str(out)).splits.items()}


@pytest.mark.parametrize("function, out", [(from_ids, "tokens/mine"), (from_texts, "tokens/texts")])
def test_the_example_runs(function, out, tmp_path, monkeypatch):
    """Catches an example that does not run, or that prints something else."""
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestFinder().find(function, globs={})[0]
    assert len(test.examples) >= 2
    said = []
    assert doctest.DocTestRunner().run(test, out=said.append).failed == 0, "".join(said)
    dataset.verify(out)
    cfg = preset("laptop", **{"data.path": out})
    assert dataset.batch(cfg, 0)["tokens_BT"].shape == (8, 256)


def test_your_own_texts_are_tokenized(tmp_path):
    """Catches texts that are lost, the wrong field, a special token that ends a text, a split that depends on the
    order, an empty split, and a row that is not text."""
    texts = [f"text {n}<|endoftext|>" for n in range(40)]
    first = from_texts(texts, str(tmp_path / "first"), val_share=0.3)
    assert sum(split["documents"] for split in first["splits"].values()) == 40
    of = lambda out, split: sorted("".join(map(chr, streams(tmp_path / out)[split])).split(chr(256)))
    rows = [{"title": "x", "body": text} for text in reversed(texts)]
    from_texts(lambda: iter(rows), str(tmp_path / "rows"), text_field="body", val_share=0.3)
    assert sorted(of("rows", "train") + of("rows", "val")) == sorted(of("first", "train") + of("first", "val"))
    from_texts(iter(reversed(texts)), str(tmp_path / "again"), val_share=0.3)
    assert of("again", "val") == of("first", "val") and len(of("again", "val")) > 5
    one = from_texts(["a text"], str(tmp_path / "one"))
    assert all(split["tokens"] for split in one["splits"].values())
    with pytest.raises(UserError, match=r"row 1 of the source: no field 'text'; it has title, body"):
        from_texts(rows, str(tmp_path / "bad"))
    with pytest.raises(UserError, match=r"row 2 of the source is int; it must be text, or a dict of texts"):
        from_texts(["a", 3], str(tmp_path / "bad"))
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_ids_of_a_text_equal_its_prepared_tokens(tmp_path, tokenizer):
    """Catches documents in another order or without their end of text, and another vocabulary, entropy or number of
    bytes than data.prepare gives for the same text."""
    tokenizer = write_ranks(tmp_path / "ranks", [b"un", b"si"]) if tokenizer == "bpe" else tokenizer
    (tmp_path / "texts").mkdir()
    for n, text in enumerate("un déux trois quatre 五 six sept huit neuf dix".split()):
        (tmp_path / "texts" / f"{n}").write_text(text * (n + 1))
    source = f"text:{tmp_path}/texts/*"
    want = prepare.prepare(prepare.Arguments(str(tmp_path / "text"), source, tokenizer, val_share=0.4, shard_tokens=20))
    documents, encoding = {"train": [], "val": []}, tokenizers.load(tokenizer)
    for document in prepare.sources.read_documents(source):
        documents[units.split_of(document.name, 0.4)].append(tokenizers.encode(encoding, document.text))
    got = from_ids(documents["train"], str(tmp_path / "ids"), tokenizer=tokenizer, validation_ids=documents["val"],
                   shard_tokens=20)  # fmt: skip
    assert got.pop("arguments")["source"] == "ids" and got.pop("sources") == [{"source": "ids", "weight": 1.0}]
    assert got == {name: value for name, value in want.items() if name not in ("arguments", "sources", "units")}
    assert json.loads((tmp_path / "ids" / "manifest.json").read_text()).keys() == want.keys() - {"units"}
    dataset.verify(str(tmp_path / "ids"))


def test_each_document_has_one_end_of_text_before_it(tmp_path):
    """Catches a second end of text where the user already had one, before or after a document, and empty documents."""
    want = [9, 1, 2, 9, 3]
    for n, ids in enumerate((
        np.array([1, 2, 9, 3], np.uint8), np.array([9, 1, 2, 9, 3, 9]), [1, 2, 9, 9, 3], [[1, 2], [3]],
        [np.array([9, 1, 2]), np.array([], np.float64), np.array([3, 9])], [np.array([1, 2, 9, 3], np.uint64)],
        np.array([1, 2, 9, 3], ">i4"),
    )):  # fmt: skip
        manifest = from_ids(ids, str(tmp_path / str(n)), vocab_size=10, eot=9, validation_ids=ids)
        assert streams(tmp_path / str(n)) == {"train": want, "val": want}
        assert manifest["splits"]["train"]["documents"] == 2 and manifest["tokenizer"]["vocabulary"] == 10


def test_without_an_end_of_text_a_new_id_is_added(tmp_path):
    """Catches an end of text that is one of the user's ids, or that has no row in the embedding."""
    manifest = from_ids([np.arange(65_536)], str(tmp_path / "a"), vocab_size=65_536, validation_ids=[3])
    assert manifest["tokenizer"] == {"name": "unknown", "fingerprint": None, "vocabulary": 65_537, "eot": 65_536}
    assert manifest["dtype"] == "uint32" and streams(tmp_path / "a")["val"] == [65_536, 3]
    with pytest.raises(UserError, match=r"model\.vocab_size=65536 allows 0\.\.65535; use --model.vocab_size 65544"):
        dataset.load(str(tmp_path / "a"), vocab_size=65_536)


@pytest.mark.parametrize(
    "share, train, val",
    [
        (0.3, [9, 1, 2, 9, 3, 4, 5, 9, 6, 7], [9, 8, 0, 1]),  # split at the end of a document
        (0.4, [9, 1, 2, 9, 3, 4, 5, 9, 6], [9, 7, 9, 8, 0, 1]),  # split inside a document
        (0.001, [9, 1, 2, 9, 3, 4, 5, 9, 6, 7, 9, 8, 0], [9, 1]),  # at least one token
    ],
)
def test_the_last_tokens_are_held_out(tmp_path, share, train, val):
    """Catches tokens in both splits or in neither, a share of documents instead of tokens, and a piece without an end
    of text before it."""
    documents = [[1, 2], [3, 4, 5], [6, 7], [8, 0, 1]]
    from_ids(documents, str(tmp_path / "a"), vocab_size=10, eot=9, val_share=share)
    assert streams(tmp_path / "a") == {"train": train, "val": val}


WRONG = {  # case -> (arguments, message)
    "above": (dict(train_ids=[np.arange(9), np.array([1, 300, 301])], vocab_size=300),
              r"train_ids\[1\]\[1\] is 300: not one of the ids 0\.\.299 \(2 of 3 are not\)"),
    "the new end": (dict(train_ids=[1, 300], vocab_size=300), r"train_ids\[1\] is 300: not one of the ids 0\.\.299"),
    "below": (dict(train_ids=np.array([1, -1]), vocab_size=300), r"train_ids\[1\] is -1: not one of the ids 0\.\.299"),
    "of the tokenizer": (dict(train_ids=[257], tokenizer="bytes"), r"train_ids\[0\] is 257: .* 0\.\.256 \(1 of 1"),
    "in validation": (dict(train_ids=[1], vocab_size=3, validation_ids=[7]), r"validation_ids\[0\] is 7: not one of"),
    "floats": (dict(train_ids=np.ones(3), vocab_size=3), "train_ids has dtype float64; token ids must be integers"),
    "booleans": (dict(train_ids=[[1], np.ones(3, bool)], vocab_size=3), r"train_ids\[1\] has dtype bool; token ids"),
    "words": (dict(train_ids=["a b"], vocab_size=3), r"train_ids\[0\] has the shape \[\]"),
    "rows": (dict(train_ids=np.ones((4, 3), int), vocab_size=3), r"train_ids has the shape \[4, 3\], not one "
             r"dimension; pass x.reshape\(-1\) for one stream of ids, or list\(x\) for one document per row"),
    "nothing": (dict(train_ids=[], vocab_size=3), "train_ids contains no tokens"),
    "empty documents": (dict(train_ids=[[], [2]], vocab_size=3, eot=2), "train_ids contains no tokens"),
    "no validation": (dict(train_ids=[1], vocab_size=3, validation_ids=np.array([])), "validation_ids contains no"),
    "one token": (dict(train_ids=[1], vocab_size=3), r"train_ids has 1 tokens, and val_share=0\.05 leaves 0 of these"),
    "share": (dict(train_ids=[1, 2], vocab_size=3, val_share=1.0), r"val_share=1\.0: must be between 0 and 1"),
    "no vocabulary": (dict(train_ids=[1, 2]), r"tokenizer='' and vocab_size=0; pass exactly one of them: a "),
    "two": (dict(train_ids=[1, 2], tokenizer="bytes", vocab_size=3), r"tokenizer='bytes' and vocab_size=3; pass "),
    "two ends": (dict(train_ids=[1, 2], tokenizer="bytes", eot=0), "eot=0 and tokenizer='bytes', whose end-of-text id"),
    "end": (dict(train_ids=[1, 2], vocab_size=3, eot=3), r"eot=3: not one of the ids 0\.\.2; leave eot out to add"),
    "tokenizer": (dict(train_ids=[1, 2], tokenizer="byte"), "unknown tokenizer 'byte'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_id_is_named_with_its_position(tmp_path, wrong):
    """Catches ids that wrap around or exceed the embedding, truncated fractions, and a leftover directory that looks as
    if it had tokens."""
    settings, message = WRONG[wrong]
    with pytest.raises(UserError, match=message):
        from_ids(out=str(tmp_path / "a"), **settings)
    assert not (tmp_path / "a").exists()


def test_existing_files_are_not_replaced_by_accident(tmp_path):
    """Catches overwritten tokens of a running training, deleted files of others, and an empty directory refused."""
    out = tmp_path / "a"
    out.mkdir()
    from_ids([1, 2, 1], str(out), vocab_size=3, shard_tokens=1)
    (out / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for there in (out, out / "notes.txt"):
        with pytest.raises(UserError, match=f"{there} exists; choose another directory, or pass overwrite=True"):
            from_ids([2, 2], str(there), vocab_size=3, overwrite=there != out)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    from_ids([2, 2], str(out), vocab_size=3, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json",
        "notes.txt",
        "train-00000.begins.npy",
        "train-00000.npy",
        "val-00000.begins.npy",
        "val-00000.npy",
    ]
    with pytest.raises(UserError, match="prepared with different settings: source is 'stdlib' here and 'ids' there"):
        prepare.prepare(prepare.Arguments(str(out)))


def test_a_run_on_ids_without_a_tokenizer(tmp_path):
    """Catches a run that fails at its end, invents bits per byte, does not print that it draws no sample, or refuses a
    prompt although nothing is sampled; and a sampler that prints a traceback."""
    rng = np.random.default_rng(0)
    from_ids(rng.integers(0, 200, 3000), str(tmp_path / "ids"), vocab_size=200)
    assert math.isnan(dataset.bytes_per_token(dataset.load(str(tmp_path / "ids"))))
    words = ["tiny", "--data.path", tmp_path / "ids", "--run.dir", tmp_path, "--run.steps", 2, "--run.eval_every", 1,
             "--model.n_layers", 3, "--model.dense_prefix", 0, "--model.moe_every", 1, "--model.n_shared", 0,
             "--model.attention", "gqa", "--run.sample_prompt", "longer than eighteen tokens"]  # fmt: skip
    status, out, err = run(words)
    assert (status, err) == (0, "")
    assert f"sample     none at the end, because the tokenizer of {tmp_path}/ids is unknown\n" in out
    assert "nats/token over 150 tokens; entropy of the text" in out and "bits/byte" not in out and "nan" not in out
    evaluations = rows(tmp_path / "tiny", "eval")
    assert len(evaluations) == 2 and all(row["bits_per_byte"] is None and row["loss"] > 3 for row in evaluations)
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {
        "config.json", "parameters.txt", "metrics.jsonl", "checkpoints", "saved", "report.png"}  # fmt: skip
    assert run(words)[1].startswith(f"{tmp_path}/tiny is complete: 2 of 2 steps taken.")
    with pytest.raises(UserError, match="tiny has no tokenizer, which text input and output need; set --tokenizer to"):
        generate.load(str(tmp_path / "tiny"))


def test_ids_with_a_tokenizer_count_bytes(tmp_path):
    """Catches a tokenizer that is named and not used, and an end of text that counts as text."""
    from_ids(np.tile(np.frombuffer(b"abcd efgh. ", np.uint8), 300), str(tmp_path / "ids"), tokenizer="bytes")
    cfg = replace(preset("tiny"), **{"data.path": str(tmp_path / "ids")})
    corpus = dataset.load(cfg.data.path, cfg.model.vocab_size, cfg.data.seq_len)
    assert tokenizers.from_manifest(corpus.manifest).name == "bytes"
    assert dataset.bytes_per_token(corpus) == 1.0  # one byte per target; the end of text has none
