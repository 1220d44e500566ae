"""`python -m data.check` describes tokens in text and a plot, and names damaged files."""

import hashlib
import json

import numpy as np
import pytest

import dataset
from config import DataConfig
from data import check, prepare
from utils import UserError

TEXTS = [f"text {n}, 五 " * n or "\n\n  the first\nthe second" for n in range(40)]


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "texts").mkdir()
    for n, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{n:02}").write_text(text)
    out = tmp_path / "tokens"
    prepare.prepare(prepare.Arguments(str(out), f"text:{tmp_path}/texts/*", val_share=0.3, shard_tokens=500))
    return out


@pytest.mark.parametrize("chunk", [3, 100, 10**6])
def test_the_summary_describes_the_text(tmp_path, tokens, capsys, monkeypatch, chunk):
    """Catches documents counted twice or lost between two reads, and lengths in another unit than tokens."""
    monkeypatch.setattr(check, "CHUNK_TOKENS", chunk)
    capsys.readouterr()
    found = check.check(check.Arguments(str(tokens), plot=str(tmp_path / "a.png")))
    lengths = [1 + len(text.encode()) for text in TEXTS]
    total = sum(found.values())
    for n in range(12):
        assert total[n] == sum(2**n <= length < 2 ** (n + 1) for length in lengths)
    said = capsys.readouterr().out
    splits = dataset.load(str(tokens)).manifest["splits"]
    for name, split in splits.items():
        ids = np.unique(np.concatenate([np.load(tokens / shard["file"]) for shard in split["shards"]]))
        assert split["unique_tokens"] == len(ids)
        assert (
            f"{name}: {split['tokens']:,} tokens in {split['documents']} documents and {len(split['shards'])} shards, "
            f"{len(ids)} of 257 ids used, {split['text_bytes'] / split['tokens']:.2f} bytes of text per token\n"
        ) in said
    assert f"source 'text:{tmp_path}/texts/*', tokenizer 'bytes', vocabulary 257 (uint16)\n" in said
    assert "  | the first\n" in said, "the first line that is not empty"
    assert said.count("  | ") == 6 and (tmp_path / "a.png").stat().st_size > 3000


def test_a_damaged_shard_is_named(tokens, capsys):
    """Catches a check that reads only the manifest."""
    with (tokens / "train-00001.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"\1")
    assert check.main([str(tokens)]) == 2
    assert "train-00001.npy has sha256 " in capsys.readouterr().err
    assert check.main([str(tokens.parent / "none")]) == 2
    with pytest.raises(UserError, match="cannot write a figure ending in 'xyz'"):
        check.check(check.Arguments(str(tokens), plot="a.xyz"))


def test_positions_of_documents_are_checked(tokens, monkeypatch):
    """Catches positions that match their sha256 and are wrong, or belong to another shard than their tokens."""
    monkeypatch.setattr(check, "CHUNK_TOKENS", 70)
    file, manifest = tokens / "train-00001.begins.npy", tokens / "manifest.json"
    places = np.load(file)
    np.save(file, places + np.uint32(1))
    with pytest.raises(UserError, match=r"train-00001\.begins\.npy has sha256 "):
        check.check(check.Arguments(str(tokens)))
    about = json.loads(manifest.read_text())
    about["splits"]["train"]["shards"][1]["begins"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"split 'train': the chunk at token \d+ has \d document starts, but the"):
        check.check(check.Arguments(str(tokens)))


def test_rows_are_printed_for_both_packings(tokens, capsys):
    """Catches numbers of rows that differ from those of a run."""
    check.check(check.Arguments(str(tokens), seq_len=60))
    said = capsys.readouterr().out
    for name, split in dataset.load(str(tokens)).splits.items():
        of_split = said.partition(f"\n{name}: ")[2].partition("\n\n")[0]
        for packing in ("windows", "documents"):
            words = dataset.describe_epoch(split, DataConfig(seq_len=60, packing=packing))
            assert f"  {words}\n" in of_split and (" windows of " in words) == (packing == "windows")


def test_ids_without_a_tokenizer_are_checked(tmp_path, capsys):
    """Catches a check that fails because there is no tokenizer."""
    prepare.from_ids(np.arange(1000) % 7, str(tmp_path / "ids"), vocab_size=7)
    assert check.main([str(tmp_path / "ids")]) == 0
    said = capsys.readouterr().out
    assert "train: 951 tokens in 1 documents and 1 shards, 8 of 8 ids used\n" in said and "  | " not in said
