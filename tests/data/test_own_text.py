"""Your own text, however small or odd, becomes training and validation tokens, or is refused by name."""

import itertools
import re

import numpy as np
import pytest

import dataset
from config import preset
from data import prepare, sources, tokenizers, units
from tests.data.test_prepare import contents, manifest_of, stream, write_ranks

LINES = "".join(f"{n} lines, née 五\n" for n in range(400))


def run(out, source, *more):
    return prepare.main(["--out", str(out), "--source", source, *more])


@pytest.fixture
def folder(tmp_path):
    """Four files whose names all put them into train."""
    (tmp_path / "mine").mkdir()
    for n in range(1, 5):
        (tmp_path / "mine" / f"part{n}.txt").write_text(LINES[n:], encoding="utf-8")
    return tmp_path / "mine"


# Few documents


@pytest.mark.parametrize("pattern, documents", [("part1.txt", 1), ("part*.txt", 4)])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_few_documents_validate_on_their_tails(tmp_path, folder, capsys, pattern, documents, tokenizer):
    """Catches a small corpus refused, text lost, doubled or changed at the cut, a split character, shards left over
    from the first attempt, and tails that depend on the tokenizer, so that bits per byte would not compare."""
    name = write_ranks(tmp_path / "ranks", [b"li", b"ne", "五".encode()]) if tokenizer == "bpe" else "bytes"
    out, encoding = tmp_path / "out", tokenizers.load(name)
    assert run(out, f"text:{folder}/{pattern}", "--tokenizer", name, "--shard-tokens", "3000") == 0
    assert re.match(rf"note: splitting {documents} documents by the hash of their names leaves 'val' empty at "
                    "--val-share 0.05; the tail of each document .*\nout: train ", capsys.readouterr().out)  # fmt: skip
    dataset.verify(str(out))
    assert len([*out.glob("*.npy")]) == 2 * sum(len(split["shards"]) for split in manifest_of(out)["splits"].values())
    parts = {}
    for split in ("train", "val"):
        ids = stream(out, split).tolist()
        ends = [*np.flatnonzero(np.array(ids) == encoding.eot_token).tolist(), len(ids)]
        assert ends[0] == 0 and len(ends) == documents + 1
        parts[split] = [encoding.decode_bytes(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]
        assert manifest_of(out)["splits"][split]["text_bytes"] == sum(map(len, parts[split]))
    wanted = [path.read_bytes() for path in sorted(folder.glob(pattern))]
    assert [train + val for train, val in zip(parts["train"], parts["val"], strict=True)] == wanted
    for text, val in zip(wanted, parts["val"], strict=True):
        assert 0 <= len(val) - len(text) * 0.05 < 4, "at most a character more than 5%"
        val.decode()
    cfg = preset("laptop", **{"data.path": str(out), "model.vocab_size": 264})
    assert dataset.batch(cfg, 0)["tokens_BT"].shape == (8, 256)
    assert sum(batch["weights_BT"].sum() for batch in dataset.evaluation_batches(cfg)) == len(stream(out, "val")) - 1


def test_a_corpus_with_both_splits_is_not_cut(tmp_path, capsys):
    """Catches tails cut from documents although their names already give both splits."""
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"text {n}")
    assert run(tmp_path / "out", f"text:{tmp_path}/*.txt") == 0
    names = sorted(f"{n}.txt" for n in range(40))
    val = [name for name in names if units.split_of(name, 0.05) == "val"]
    held_out = stream(tmp_path / "out", "val").astype(np.uint8).tobytes()  # the end of text, 256, becomes 0
    assert val and held_out.split(b"\0")[1:] == [(tmp_path / name).read_bytes() for name in val]
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("share, missing", [("0.05", "val"), ("0.95", "train")])
def test_either_split_can_be_the_empty_one(tmp_path, folder, capsys, share, missing):
    """Catches a cut that handles only an empty val, and an empty document that counts as validation text."""
    (folder / "0.txt").touch()
    names = [document.name for document in sources.read_documents(f"text:{folder}/*")]
    assert len(names) == 5 and len({units.split_of(name, float(share)) for name in names if name != "0.txt"}) == 1
    assert run(tmp_path / "out", f"text:{folder}/*", "--val-share", share) == 0
    assert f"leaves {missing!r} empty at --val-share {share}; the tail" in capsys.readouterr().out
    splits = manifest_of(tmp_path / "out")["splits"]
    found = splits["val"]["text_bytes"] / sum(split["text_bytes"] for split in splits.values())
    assert found == pytest.approx(float(share), abs=0.001)


def test_a_text_that_is_too_short_is_refused(tmp_path, capsys):
    """Catches an empty file with advice to change the share, text too short for both splits, and leftover files."""
    for text, message in [
        ("", "{!r} contains no text: 0 bytes in 1 documents"),
        ("五", "{!r} contains 3 bytes of text in 1 documents, so 'train' is empty at --val-share 0.05; use more text"),
    ]:
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        source = f"text:{tmp_path}/a.txt"
        assert run(tmp_path / "new" / "out", source) == 2
        assert capsys.readouterr().err == f"error: {message.format(source)}\n"
        assert not (tmp_path / "new").exists()
    (tmp_path / "a.txt").write_text("ab")
    assert run(tmp_path / "new" / "out", source) == 0
    assert [stream(tmp_path / "new" / "out", split).tolist() for split in ("train", "val")] == [[256, 97], [256, 98]]


def test_a_split_too_short_for_a_window_names_the_share(tmp_path, folder):
    """Catches a message that tells someone with one file to find more text."""
    run(tmp_path / "out", f"text:{folder}/part1.txt", "--val-share", "0.01")
    with pytest.raises(ValueError, match=r"split 'val' has \d+ tokens, .* or prepare it with a larger --val-share"):
        dataset.load(str(tmp_path / "out"), seq_len=256)


# Doing it again


@pytest.mark.parametrize("how", ["bad row", "interrupted"])
def test_a_failure_loses_nothing(tmp_path, folder, monkeypatch, how):
    """Catches tokens deleted before the new ones exist, and shards left by a failure."""

    def interrupt(*_):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    assert run(out, f"text:{folder}/*") == 0
    before = contents(out)
    source = f"text:{folder}/*"
    if how == "interrupted":
        monkeypatch.setattr(prepare, "_publish", interrupt)
    else:
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 99 + "broken")
        source = f"jsonl:{tmp_path}/rows.jsonl"
    assert run(out, source, "--shard-tokens", "50", "--overwrite") == (130 if how == "interrupted" else 2)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert (out / ".unfinished-units").exists() == (how == "interrupted"), "what is done is kept"
    dataset.verify(str(out))
    assert run(tmp_path / "new", source) != 0 and (tmp_path / "new").exists() == (how == "interrupted")
    monkeypatch.undo()
    assert run(tmp_path / "new", f"text:{folder}/*") == 0 == run(out, f"text:{folder}/*", "--overwrite")
    assert contents(tmp_path / "new") == contents(out) == before


def test_a_directory_is_named_as_it_was_given(tmp_path, folder, monkeypatch, capsys):
    """Catches a line of output with the path of a temporary directory."""
    monkeypatch.chdir(tmp_path)
    for given, name in [("tokens/own", "tokens/own"), (str(tmp_path / "tokens/other/"), "other")]:
        for words in ("", " is complete"):
            capsys.readouterr()
            assert run(given, "text:mine/*") == 0
            assert capsys.readouterr().out.splitlines()[-1].startswith(f"{name}{words}: train ")


# Odd files


def test_text_that_is_not_utf8_is_not_silently_changed(tmp_path, capsys):
    """Catches letters silently replaced by U+FFFD, and binary files silently taken for text."""
    (tmp_path / "a.txt").write_bytes("déjà vu".encode("latin1") * 50)
    (tmp_path / "b.txt").write_text("déjà vu" * 50, encoding="utf-8")
    source = f"text:{tmp_path}/*.txt"
    assert run(tmp_path / "out", source, "--tokenizer", write_ranks(tmp_path / "ranks", [b"vu"])) == 2
    assert capsys.readouterr().err == (
        "error: a.txt: byte 2, 0xe9, is not UTF-8; convert the file (iconv -f latin1 -t utf-8), or use --tokenizer "
        "bytes, which accepts any bytes\n"
    )
    assert not (tmp_path / "out").exists()
    assert run(tmp_path / "out", source) == 0
    said = capsys.readouterr().out
    assert "note: 1 of 2 documents (first: 'a.txt') are not UTF-8; their bytes are used unchanged\n" in said
    splits = manifest_of(tmp_path / "out")["splits"].values()
    assert sum(split["text_bytes"] for split in splits) == sum(p.stat().st_size for p in tmp_path.glob("*.txt"))


def test_a_folder_means_the_files_in_it(tmp_path, folder, capsys):
    """Catches a folder reported as empty, files whose names differ from those of a pattern, and a folder whose own name
    looks like a pattern."""
    strange = folder.rename(tmp_path / "my [texts]*")
    (strange / "below").mkdir()
    (strange / "below" / "x[1].txt").write_text("x")
    names = ["below/x[1].txt", *(f"part{n}.txt" for n in range(1, 5))]
    assert [document.name for document in sources.read_documents(f"text:{strange}")] == names
    assert [document.name for document in sources.read_documents(f"text:{strange}/below/x[1].txt")] == ["x[1].txt"]
    folder = strange.rename(folder)
    assert [document.name for document in sources.read_documents(f"text:{folder}/**")] == names
    assert run(tmp_path / "out", f"text:{folder}/*.md") == 2
    assert f"error: no file matches '{folder}/*.md'" in capsys.readouterr().err


def test_a_file_counts_once(tmp_path, folder, capsys):
    """Catches a file in both train and val under two names, and a --source that is ignored."""
    (folder / "a").mkdir()
    (folder / "a" / "again.txt").symlink_to(folder / "part1.txt")
    names = [document.name for document in sources.read_documents(f"text:{folder}/**/**/*.txt")]
    assert names == ["a/again.txt", "part2.txt", "part3.txt", "part4.txt"]
    assert run(tmp_path / "out", f"text:{folder}/part1.txt", f"--source=text:{folder}/part2.txt") == 2
    assert "--source is given more than once; use one pattern for several files" in capsys.readouterr().err
