"""Text always becomes the same token shards, without partial results and without silent differences."""

import base64
import hashlib
import http.server
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import tiktoken.registry
from hypothesis import given, settings, strategies as st

import dataset
from config import preset
from data import prepare, sources, tokenizers, units
from utils import UserError

TEXTS = {f"{name}.txt": (name * n) for n, name in enumerate("un déux trois quatre 五 six sept huit neuf dix".split())}


@pytest.fixture
def texts(tmp_path):
    """Ten small files, one of them empty, whose names give both splits at --val-share 0.4."""
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    return f"text:{tmp_path}/texts/*.txt"


def run(out, source, *more):
    return prepare.main(["--out", str(out), "--source", source, "--val-share", "0.4", *more])


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def stream(out, split="train"):
    return np.concatenate([np.load(out / shard["file"]) for shard in manifest_of(out)["splits"][split]["shards"]])


def write_ranks(path, merges, before=()):
    """Write a rank file: the 256 bytes, then the merged tokens."""
    tokens = [*before, *(bytes([byte]) for byte in range(256)), *merges]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return f"bpe:{path}"


# Sources


def test_the_standard_library_has_a_fixed_order(monkeypatch):
    """Catches an order that depends on the file system, tests or installed packages, and changed bytes."""
    documents = [document[:2] for document in sources.read_documents("stdlib")]
    names = [name for name, _ in documents]
    assert names == sorted(set(names)) and len(names) > 300
    assert not [name for name in names if re.search(r"(^|/)(tests?|idle_test|site-packages|__pycache__)/", name)]
    assert dict(documents)["json/decoder.py"] == Path(sysconfig.get_path("stdlib"), "json/decoder.py").read_bytes()

    walk = os.walk

    def walk_backwards(root):
        for folder, folders, files in walk(root):
            yield folder, folders, files[::-1]
            folders.reverse()

    monkeypatch.setattr(os, "walk", walk_backwards)
    assert names == [document.name for document in sources.read_documents("stdlib")]


def test_a_document_stays_in_its_split(tmp_path):
    """Catches a split by position or absolute path: adding or moving files would then leak val into train."""

    def splits(folder, names):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("x")
        return {d.name: units.split_of(d.name, 0.3) for d in sources.read_documents(f"text:{folder}/**")}

    before = splits(tmp_path / "here", [f"{n}.txt" for n in range(10, 40)])
    after = splits(tmp_path / "there", [f"{n}.txt" for n in range(60)])
    assert before.items() <= after.items()
    assert set(before.values()) == {"train", "val"}
    held_out = [units.split_of(f"{n}.py", 0.05) for n in range(10_000)].count("val")
    assert abs(held_out - 500) < 5 * 22  # 5 standard deviations, sqrt(10000 * 0.05 * 0.95) = 22


def test_text_json_lines_and_parquet_give_the_same_text(tmp_path, texts):
    """Catches a reader that drops, reorders, strips or re-encodes documents."""
    import pyarrow
    import pyarrow.parquet

    wanted = [TEXTS[name] for name in sorted(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": 1, "body": text}) + "\n" for text in wanted[:7]))
    (tmp_path / "b.jsonl").write_text("\n" + "".join(json.dumps({"body": text}) + "\n" for text in wanted[7:]))
    table = pyarrow.table({"n": list(range(10)), "body": wanted})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet", row_group_size=3)
    for source in (texts, f"jsonl:{tmp_path}/*.jsonl", f"parquet:{tmp_path}/all.parquet"):
        documents = list(sources.read_documents(source, text_field="body"))
        assert [document.text.decode() for document in documents] == wanted, source
        assert len({document.name for document in documents}) == len(wanted), source


def test_a_bad_row_is_named_by_file_and_line(tmp_path):
    """Catches a reader that skips what it cannot read, or fails without a position."""
    import pyarrow
    import pyarrow.parquet

    def refusal(source):
        with pytest.raises(UserError) as error:
            list(sources.read_documents(source))
        return str(error.value)

    for line, reason in [
        ('{"text": "b"', r"not JSON"),
        ("[1]", r"a list, not an object"),
        ('{"title": "b", "body": "c"}', r"no field 'text'; it has title, body; choose one with --text-field"),
        ('{"text": 5}', r"field 'text' is int, not text"),
    ]:
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' + line + "\n")
        assert re.search(rf"rows\.jsonl:2: {reason}", refusal(f"jsonl:{tmp_path}/rows.jsonl"))

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), path)
    assert "rows.parquet: no field 'text'; it has body" in refusal(f"parquet:{path}")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    assert "rows.parquet:2: field 'text' is NoneType, not text" in refusal(f"parquet:{path}")
    path.write_text("no")
    assert "rows.parquet: not a Parquet file" in refusal(f"parquet:{path}")
    assert "no file matches" in refusal(f"text:{tmp_path}/none/*")
    assert "unknown source 'csv:x'; use stdlib, text:GLOB" in refusal("csv:x")


# Tokenizers


@given(st.text())
def test_the_bytes_of_a_text_are_its_tokens(text):
    """Catches a fast path for bytes that differs from the encoding that decodes samples."""
    encoding = tokenizers.load("bytes")
    tokens = tokenizers.encode(encoding, text.encode()).tolist()
    assert tokens == encoding.encode_ordinary(text)
    assert encoding.decode(tokens) == text
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)


def test_an_end_of_text_inside_a_document_is_text(tmp_path):
    """Catches text that can forge a document boundary."""
    for name in ("bytes", write_ranks(tmp_path / "ranks", [b"<|"])):
        encoding = tokenizers.load(name)
        tokens = tokenizers.encode(encoding, b"a<|endoftext|>b").tolist()
        assert encoding.eot_token not in tokens
        assert encoding.decode(tokens) == "a<|endoftext|>b"


@settings(max_examples=50)
@given(st.text(alphabet="the r", max_size=30))
def test_a_rank_file_merges_like_a_reference(tmp_path_factory, text):
    """Catches ranks read in the wrong order, a wrong pattern, an end of text that is not the last id."""
    merges = [b"th", b"the", b" t", b"er", b" th", b" the", b"ee"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + n for n, token in enumerate(merges)}
    encoding = tokenizers.load(write_ranks(tmp_path_factory.getbasetemp() / "ranks", merges))

    def merged(word):
        parts = [bytes([byte]) for byte in word.encode()]
        while pairs := [(ranks[a + b], n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]:
            _, n = min(pairs)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        return [ranks[part] for part in parts]

    # The last space of a run belongs to the next word.
    words = re.findall(r" ?[ther]+| +(?![ther])| +(?= )", text)
    assert tokenizers.encode(encoding, text.encode()).tolist() == [id for word in words for id in merged(word)]
    assert encoding.eot_token == encoding.n_vocab - 1 == 256 + len(merges)


def test_an_invalid_rank_file_is_refused(tmp_path):
    """Catches ranks that crash the tokenizer much later, or give two tokens one id."""
    path = tmp_path / "ranks"
    good = base64.b64encode(b"th") + b" 256"
    for last, message in [
        (b"dGg= x", r"ranks:257: not a base64 token, a space and a rank: b'dGg= x'"),
        (b"?? 256", r"ranks:257: not a base64 token"),
        (b"dGg=", r"ranks:257: not a base64 token"),
        (b"dGg= 300", r"the ranks of its 257 lines must be 0..256, each once"),
    ]:
        write_ranks(path, [b"th"])
        path.write_bytes(path.read_bytes().replace(good, last))
        with pytest.raises(UserError, match=message):
            tokenizers.load(f"bpe:{path}")
    path.write_bytes(b"YQ== 0\n")
    with pytest.raises(UserError, match=r"255 of the 256 single bytes have no rank \(first: 0\)"):
        tokenizers.load(f"bpe:{path}")
    with pytest.raises(UserError, match="No such file"):
        tokenizers.load(f"bpe:{tmp_path}/none")
    with pytest.raises(UserError, match="unknown tokenizer 'gpt5'; use bytes, gpt2"):
        tokenizers.load("gpt5")


def test_different_tokenizers_have_different_fingerprints(tmp_path):
    """Catches a fingerprint that misses ranks, pattern or special tokens, or that depends on the file's name."""
    same = [tokenizers.load(write_ranks(tmp_path / name, [b"th", b"er"])) for name in "ab"]
    swapped = tokenizers.load(write_ranks(tmp_path / "c", [b"er", b"th"]))
    parts = {"pat_str": same[0]._pat_str, "mergeable_ranks": same[0]._mergeable_ranks, "special_tokens": {"end": 258}}
    other_end = tiktoken.Encoding("x", **parts)
    other_cut = tiktoken.Encoding("x", **parts | {"special_tokens": same[0]._special_tokens, "pat_str": r"(?s:.+)"})
    marks = [tokenizers.fingerprint(encoding) for encoding in (*same, swapped, other_end, other_cut)]
    assert marks[0] == marks[1] and len(set(marks)) == 4


@pytest.mark.parametrize("place", ["first", "last"])
def test_an_end_of_text_listed_in_a_rank_file_is_used(tmp_path, place):
    """Catches a second end of text after the file's own, an id 0 that cannot be the end, and text that forges it."""
    end = tokenizers.END_OF_TEXT.encode()
    tokens = {"before": [end], "merges": [b"th"]} if place == "first" else {"merges": [b"th", end]}
    encoding = tokenizers.load(write_ranks(tmp_path / "ranks", **tokens))
    assert (encoding.eot_token, encoding.n_vocab) == (0 if place == "first" else 257, 258)
    text = "the<|endoftext|>"
    ids = tokenizers.encode(encoding, text.encode()).tolist()
    assert encoding.decode(ids) == text and encoding.eot_token not in ids
    assert tokenizers.text_lengths(encoding)[ids].sum() == len(text)
    assert tokenizers.text_lengths(encoding)[encoding.eot_token] == 0
    (tmp_path / "a.txt").write_text("these, those and others " * 9)
    assert run(tmp_path / "out", f"text:{tmp_path}/a.txt", "--tokenizer", f"bpe:{tmp_path}/ranks") == 0
    assert manifest_of(tmp_path / "out")["tokenizer"]["eot"] == stream(tmp_path / "out")[0] == encoding.eot_token
    batch = dataset.batch(preset("tiny", **{"data.path": str(tmp_path / "out")}), 0)
    assert batch["segments_BT"].max() == 1, "an id 0 inside a document is taken for its end"


def test_a_changed_rank_file_is_refused(tmp_path, texts):
    """Catches ids decoded by another tokenizer: the loss is fine, but samples are noise."""
    name = write_ranks(tmp_path / "ranks", [b"th", b"er"])
    run(tmp_path / "out", texts, "--tokenizer", name)
    manifest = manifest_of(tmp_path / "out")
    assert tokenizers.from_manifest(manifest).n_vocab == 259
    write_ranks(tmp_path / "ranks", [b"er", b"th"])
    with pytest.raises(
        UserError, match=rf"tokenizer '{name}' has changed since the tokens were prepared.*restore the file"
    ):
        tokenizers.from_manifest(manifest)


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """Reset tiktoken: nothing in memory, an empty cache folder."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def proxy(monkeypatch, port):
    """Send tiktoken's downloads, which are https, to a local port."""
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("listening", [False, True], ids=["refused", "no answer"])
def test_a_named_tokenizer_without_a_network_fails_in_time(
    tmp_path, texts, no_cache, monkeypatch, capsys, listening
):  # fmt: skip
    """Catches a command that hangs on a network that drops packets, suggests no next step, or hides it behind urllib's
    error."""
    assert tokenizers.FETCH_SECONDS + 3 < 20  # 3 s to start; the documented limit is 20 s
    monkeypatch.setattr(tokenizers, "FETCH_SECONDS", 0.5)
    with socket.socket() as stand_in:
        stand_in.bind(("127.0.0.1", 0))
        if listening:
            stand_in.listen()
        proxy(monkeypatch, stand_in.getsockname()[1])
        began = time.monotonic()
        assert run(tmp_path / "out", texts, "--tokenizer", "cl100k_base") == 2
        assert time.monotonic() - began < 5
    message = capsys.readouterr().err
    reason = "timed out after 0.5 s" if listening else "ProxyError"
    assert message == (
        f"error: tokenizer 'cl100k_base' could not be downloaded ({reason}); use --tokenizer bytes or bpe:FILE, or run "
        "the same command on a machine with a network and set TIKTOKEN_CACHE_DIR to a copy of its cache folder\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def rank_server(tmp_path):
    """Serves one small rank file on loopback; yields its address, its sha256 and the list of requests."""
    write_ranks(tmp_path / "served", [b"th"])
    contents, asked = (tmp_path / "served").read_bytes(), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(contents)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}/ranks", hashlib.sha256(contents).hexdigest(), asked
    server.shutdown()
    server.server_close()


def serve_as(monkeypatch, name, address, sha256):
    """Let tiktoken find the ranks of `name` at another address."""
    tiktoken.list_encoding_names()  # fills ENCODING_CONSTRUCTORS

    def constructor():
        ranks = tiktoken.load.load_tiktoken_bpe(address, expected_hash=sha256)
        return {"name": name, "pat_str": r"(?s:.+)", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 257}}

    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, name, constructor)


def test_a_named_tokenizer_is_downloaded_once(rank_server, no_cache, monkeypatch):
    """Catches a download that ignores TIKTOKEN_CACHE_DIR, and a cache that still needs the network."""
    address, sha256, asked = rank_server
    serve_as(monkeypatch, "cl100k_base", address, sha256)
    for _ in range(2):
        tiktoken.registry.ENCODINGS.clear()  # as in a new process
        encoding = tokenizers.load("cl100k_base")
        assert tokenizers.encode(encoding, b"the").tolist() == [256, ord("e")]
    assert len(asked) == 1
    assert [path.name for path in no_cache.iterdir()] == [hashlib.sha1(address.encode()).hexdigest()]


def test_a_wrong_download_is_refused(rank_server, no_cache, monkeypatch):
    """Catches the page of a captive portal taken for ranks."""
    address, _, _ = rank_server
    serve_as(monkeypatch, "gpt2", address, "0" * 64)
    with pytest.raises(UserError, match=r"'gpt2' could not be downloaded \(the file has the wrong hash\)"):
        tokenizers.load("gpt2")


# Shards and manifest


@pytest.mark.parametrize("shard_tokens", [5, 20, 1000])
def test_the_shards_contain_the_text(tmp_path, texts, shard_tokens):
    """Catches tokens lost or doubled at a shard's end, a missing end of text, and short documents that are cut."""
    assert run(tmp_path / "out", texts, "--shard-tokens", str(shard_tokens)) == 0
    wanted = {"train": [], "val": []}
    for name in sorted(TEXTS):
        wanted[units.split_of(name, 0.4)].append([256, *TEXTS[name].encode()])
    manifest = manifest_of(tmp_path / "out")
    for split, documents in wanted.items():
        assert stream(tmp_path / "out", split).tolist() == [token for document in documents for token in document]
        for shard in manifest["splits"][split]["shards"]:
            tokens = np.load(tmp_path / "out" / shard["file"])
            assert len(tokens) <= shard_tokens
            if tokens[0] != 256:
                assert max(map(len, documents)) > shard_tokens, "a document was cut that fits into a shard"
    if shard_tokens == 20:
        longest = max(wanted["train"] + wanted["val"], key=len)
        assert len(longest) > 20, "no document here is longer than a shard"


def test_the_manifest_describes_the_files(tmp_path, texts):
    """Catches counts, hashes or totals that differ from the files on disk."""
    run(tmp_path / "out", texts, "--shard-tokens", "30")
    manifest = manifest_of(tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()} - {"manifest.json"}
    assert written == {file["file"] for file in dataset.files_of(manifest)}
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            tokens = np.load(tmp_path / "out" / shard["file"])
            assert shard["tokens"] == len(tokens) and tokens.dtype == manifest["dtype"]
            assert shard["documents"] == np.sum(tokens == 256)
            begins = np.load(tmp_path / "out" / shard["begins"]["file"])
            assert np.array_equal(begins, np.flatnonzero(tokens == 256)) and begins.dtype == np.uint32
            for file in (shard, shard["begins"]):
                assert file["sha256"] == hashlib.sha256((tmp_path / "out" / file["file"]).read_bytes()).hexdigest()
        for count in ("tokens", "documents"):
            assert split[count] == sum(shard[count] for shard in split["shards"])
    total_bytes = sum(split["text_bytes"] for split in manifest["splits"].values())
    assert total_bytes == sum(len(text.encode()) for text in TEXTS.values())
    encoding = tokenizers.load("bytes")
    assert manifest["tokenizer"] == {
        "name": "bytes", "fingerprint": tokenizers.fingerprint(encoding), "vocabulary": 257, "eot": 256,
    }  # fmt: skip


def test_text_bytes_do_not_depend_on_the_tokenizer(tmp_path, texts):
    """Catches bytes counted after tokenizing: bits per byte would not compare between vocabularies."""
    run(tmp_path / "bytes", texts)
    run(tmp_path / "bpe", texts, "--tokenizer", write_ranks(tmp_path / "ranks", [b"tr", b"si"]))
    counts = [
        [manifest_of(tmp_path / out)["splits"][split][count] for split in ("train", "val")]
        for count in ("text_bytes", "tokens")
        for out in ("bytes", "bpe")
    ]
    assert counts[0] == counts[1] and counts[2] != counts[3]


def test_ids_beyond_65535_get_32_bits(tmp_path, texts):
    """Catches ids that wrap around: vocabulary 65536 still fits into 16 bits, 65537 does not."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)][: 65536 - 256]
    for merges, dtype in ((pairs[:-1], np.uint16), (pairs, np.uint32)):
        out = tmp_path / np.dtype(dtype).name
        assert run(out, texts, "--tokenizer", write_ranks(tmp_path / "ranks", merges)) == 0
        tokens = stream(out)
        assert tokens.dtype == np.dtype(dtype) == np.dtype(manifest_of(out)["dtype"])
        assert tokens[0] == tokens.max() == manifest_of(out)["tokenizer"]["eot"] == 256 + len(merges)


def test_entropies_match_the_counts(monkeypatch):
    """Catches logarithms of another base, pairs that collide, and a joint entropy taken for a conditional one."""
    tokens = np.random.default_rng(0).choice(7, size=500, p=np.arange(1, 8) / 28).astype(np.uint16)
    tokens[1::2] = (tokens[::2] * 3) % 7  # every other token is determined by the one before it

    def entropy(values):
        return -sum(p * np.log(p) for p in (values.count(v) / len(values) for v in set(values)))

    pairs = list(itertools.pairwise(tokens.tolist()))
    conditional = sum(
        len(after) / len(pairs) * entropy(after) for a in range(7) if (after := [y for x, y in pairs if x == a])
    )
    measured = prepare.entropies(tokens, vocabulary=7)
    assert measured["counted_tokens"] == 500
    assert measured["unigram_nats"] == pytest.approx(entropy(tokens.tolist()), abs=1e-12)
    assert measured["bigram_nats"] == pytest.approx(conditional, abs=1e-12)
    coin = prepare.entropies(np.array([3, 66_000] * 50, np.uint32), vocabulary=100_000)
    assert coin["unigram_nats"] == pytest.approx(np.log(2))
    assert coin["bigram_nats"] == pytest.approx(0, abs=1e-12)


def test_entropies_count_a_limited_number_of_tokens(tmp_path, texts, monkeypatch):
    """Catches counting that reads the whole corpus into memory."""
    monkeypatch.setattr(prepare, "COUNTED_TOKENS", 33)
    run(tmp_path / "out", texts, "--shard-tokens", "10")
    wanted = prepare.entropies(stream(tmp_path / "out")[:33], 257)
    assert wanted.items() <= manifest_of(tmp_path / "out").items() and wanted["counted_tokens"] == 33


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """Catches a list of all documents, or a shard that is not freed."""
    monkeypatch.setattr(prepare, "COUNTED_TOKENS", 2**12)
    monkeypatch.setattr(sources, "LEAST_UNIT_BYTES", 2**17)
    with open(tmp_path / "rows.jsonl", "w") as file:
        for n in range(400):
            file.write(json.dumps({"text": f"{n:04}" * 2**13}) + "\n")  # 32 KiB each, 12.5 MiB in all
    tracemalloc.start()
    run(tmp_path / "out", f"jsonl:{tmp_path}/rows.jsonl", "--shard-tokens", str(2**18))  # 512 KiB
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(split["tokens"] for split in manifest_of(tmp_path / "out")["splits"].values()) == 400 * (2**15 + 1)
    assert peak_bytes < 4 * 2**20, "two splits hold at most a shard each, and one of them twice while it is written"


# Doing it again


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_the_same_arguments_give_the_same_bytes(tmp_path, texts):
    """Catches dates, set order or paths of the output in shards or manifest."""
    for out in ("a", "b"):
        run(tmp_path / out, texts, "--shard-tokens", "30")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_complete_work_is_not_done_again(tmp_path, texts, capsys):
    """Catches a second run that rewrites shards of a running training, and an --overwrite without effect."""
    out = tmp_path / "out"
    run(out, texts)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert run(out, texts) == 0
    assert f"{out.name} is complete: train" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run(out, texts, "--overwrite") == 0
    assert all(path.stat().st_mtime_ns > before[path] for path in before)


def test_other_arguments_are_refused_by_name(tmp_path, texts, capsys):
    """Catches tokens of one tokenizer or text used under the name of another."""
    out, ranks = tmp_path / "out", write_ranks(tmp_path / "ranks", [b"th"])
    run(out, texts, "--tokenizer", ranks)
    for source, changed, message in [
        (texts, ["--tokenizer", "bytes"], f"tokenizer is 'bytes' here and '{ranks}' there"),
        (texts, ["--tokenizer", ranks, "--val-share", "0.3"], "val_share is 0.3 here and 0.4 there"),
        (texts, ["--tokenizer", ranks, "--shard-tokens", "9"], "shard_tokens is 9 here and 33554432 there"),
        ("stdlib", ["--tokenizer", ranks], "source is 'stdlib' here and 'text:"),
    ]:
        before = contents(out)
        assert run(out, source, *changed) == 2
        assert message in capsys.readouterr().err
        assert contents(out) == before
    write_ranks(tmp_path / "ranks", [b"he"])
    assert run(out, texts, "--tokenizer", ranks) == 2
    assert "fingerprint is " in capsys.readouterr().err
    assert run(out, texts, "--overwrite", "--tokenizer", "bytes", "--shard-tokens", "9") == 0
    dataset.verify(str(out))


def test_unfinished_work_is_not_taken_for_complete(tmp_path, capsys):
    """Catches shards or a manifest left by a failure or a kill, and lost files of others."""
    out, rows = tmp_path / "out", tmp_path / "rows.jsonl"
    good = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(30))
    rows.write_text(good + "broken")
    (out).mkdir()
    (out / "train-notes.txt").write_text("mine")
    assert run(out, f"jsonl:{rows}", "--shard-tokens", "20") == 2
    assert "rows.jsonl:31: not JSON" in capsys.readouterr().err
    assert sorted(contents(out)) == ["train-notes.txt"]
    with pytest.raises(UserError, match="no tokens at"):
        dataset.load(str(out))
    for cut_off in (".unfinished-x/train-00000.npy", "val-00007.npy"):
        (out / cut_off).parent.mkdir(exist_ok=True)
        (out / cut_off).write_text("cut off")
    rows.write_text(good)
    assert run(out, f"jsonl:{rows}") == 0
    shards = [f"{split}-00000{what}.npy" for split in ("train", "val") for what in ("", ".begins")]
    assert sorted(contents(out)) == sorted(["manifest.json", "train-notes.txt", *shards])


def test_a_file_is_complete_or_missing(tmp_path, texts, monkeypatch, capsys):
    """Catches half a shard, and a full disk that ends in a traceback."""

    def save(file, tokens):
        file.write(b"half")
        raise OSError(28, "No space left on device", "the shard")

    monkeypatch.setattr(np, "save", save)
    assert run(tmp_path / "out", texts) == 2
    assert "error: [Errno 28] No space left on device: 'the shard'" in capsys.readouterr().err
    assert not [*(tmp_path / "out").rglob("*.npy"), *(tmp_path / "out").rglob("*.part")]
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_damaged_directory_is_not_called_complete(tmp_path, texts, capsys):
    """Catches a completeness check that reads only the manifest."""
    run(tmp_path / "out", texts)
    (tmp_path / "out" / "val-00000.npy").unlink()
    assert run(tmp_path / "out", texts) == 2
    assert "val-00000.npy cannot be opened" in capsys.readouterr().err


def test_the_command_exits_with_2_and_no_traceback(tmp_path):
    """Catches a traceback shown to the user, and a failure that a Makefile would not notice."""
    command = [sys.executable, "-m", "data.prepare", "--out", str(tmp_path / "out")]
    root = Path(prepare.__file__).parents[1]
    for flags, message in [
        (["--source", "csv:x"], "error: unknown source 'csv:x'"),
        (["--val-share", "1"], "val_share=1.0: must be between 0 and 1"),
    ]:
        done = subprocess.run([*command, *flags], cwd=root, capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
