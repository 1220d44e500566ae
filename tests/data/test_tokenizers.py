"""Your own tokenizer, trained here or read from a Hugging Face file, gives the library's tokens."""

import itertools
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from data import hf_json, prepare, tokenizers, train_tokenizer
from tests import extras
from utils import UserError

pytestmark = extras.require("parity")

import tokenizers as library

HELD_OUT = ("json", "email", "asyncio")  # folders of the standard library
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def stdlib(*folders):
    root = Path(sysconfig.get_path("stdlib"))
    return [path.read_text() for folder in folders for path in sorted((root / folder).glob("*.py"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A rank file trained on some files of the standard library, one of them with other alphabets."""
    folder = tmp_path_factory.mktemp("trained")
    for n, text in enumerate(stdlib("http", "logging", "encodings")[:40]):
        (folder / f"{n}.txt").write_text(text)
    (folder / "words.txt").write_text("née déjà 五五五 привет <|endoftext|> мир\n" * 50)
    words = ["--source", f"text:{folder}/*.txt", "--vocabulary", "1500"]
    for out in ("a", "b"):
        assert train_tokenizer.main([*words, "--out", f"{folder}/{out}.bpe"]) == 0
    assert (folder / "a.bpe").read_bytes() == (folder / "b.bpe").read_bytes(), "the same text gives the same file"
    return folder / "a.bpe"


def hf(ranks, pattern):
    """Build the library's tokenizer from ranks independently of our code, finding merges by merging."""
    letter = library_letters()
    spell = lambda token: "".join(letter[byte] for byte in token)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, rank), n) for n, (a, b) in enumerate(itertools.pairwise(parts))]
            _, n = min(pairs)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        if len(parts) == 2:
            merges.append(tuple(map(spell, parts)))
    made = library.Tokenizer(library.models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    split = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    steps = [split, library.pre_tokenizers.ByteLevel(False, use_regex=False)]
    made.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    made.decoder = library.decoders.ByteLevel()
    return made


def library_letters():
    """Return the letter of each byte that occurs in UTF-8, as the library spells it."""
    level = library.pre_tokenizers.ByteLevel(False, use_regex=False)
    found = hf_json.byte_letters()
    for character in map(chr, [*range(0xD800), *range(0xE000, 0x110000, 61)]):
        [(spelling, _)] = level.pre_tokenize_str(character)
        found |= dict(zip(character.encode(), spelling, strict=True))
    assert found == hf_json.byte_letters()
    return found


def test_a_trained_tokenizer_equals_the_library_s(trained):
    """Catches ranks in another order than the merges, another pattern, and another vocabulary size than requested."""
    encoding = tokenizers.load(f"bpe:{trained}")
    assert (encoding.n_vocab, encoding.eot_token) == (1500, 1499)
    theirs = hf(encoding._mergeable_ranks, tokenizers.GPT2_PATTERN)
    for text in stdlib(*HELD_OUT):
        assert tokenizers.encode(encoding, text.encode()).tolist() == theirs.encode(text).ids


@settings(max_examples=200)
@given(st.text() | st.text(alphabet=" \n\t'stérd五<|endoftxt>\u00a0\u200d", max_size=60))
def test_text_round_trips(trained, text):
    """Catches text that is normalized, and an end of text in a document that becomes a special token."""
    encoding = tokenizers.load(f"bpe:{trained}")
    ids = tokenizers.encode(encoding, text.encode()).tolist()
    assert encoding.decode_bytes(ids) == text.encode() and encoding.eot_token not in ids


def test_a_document_of_spaces_is_encoded(trained):
    """Catches tiktoken's "Max stack size exceeded", at the ten millionth document of a crawl, and a workaround that
    changes the tokens of all text."""
    encoding = tokenizers.load(f"bpe:{trained}")
    text = "words" + " " * 10**6 + "\n" * 10**6 + "五words " * 1000
    with pytest.raises(ValueError, match="Max stack size exceeded"):
        encoding.encode_to_numpy(text)
    assert encoding.decode(tokenizers.encode(encoding, text.encode()).tolist()) == text
    short = text.replace(" " * 900_000, "").replace("\n" * 900_000, "")
    assert tokenizers.encode(encoding, short.encode()).tolist() == encoding.encode_ordinary(short)


def test_every_character_and_every_byte_round_trips(trained):
    """Catches one of Unicode's 1,112,064 characters that is lost, alone or next to others."""
    encoding = tokenizers.load(f"bpe:{trained}")
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert encoding.decode_bytes(tokenizers.encode(encoding, every.encode()).tolist()) == every.encode()
    every = bytes(range(256)) * 3
    assert tokenizers.encode(tokenizers.load("bytes"), every).tobytes() == every


@pytest.mark.parametrize("pattern", ["GPT-2", "Llama 3"])
def test_a_tokenizer_json_gives_the_library_s_tokens(tmp_path, trained, pattern):
    """Catches another pattern, another id for the end of text, and special tokens that text encodes to."""
    ranks = dict(tokenizers.load(f"bpe:{trained}")._mergeable_ranks)
    theirs = hf(ranks, LLAMA3 if pattern == "Llama 3" else tokenizers.GPT2_PATTERN)
    if pattern == "GPT-2":
        theirs.pre_tokenizer = library.pre_tokenizers.ByteLevel(False)
    plain = [theirs.encode(text).ids for text in stdlib(*HELD_OUT)]
    theirs.add_special_tokens(["<|begin|>", "<|end_of_text|>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizers.load(f"json:{tmp_path}/tokenizer.json")
    assert (ours.n_vocab, ours.eot_token) == (1501, 1500)
    assert [tokenizers.encode(ours, text.encode()).tolist() for text in stdlib(*HELD_OUT)] == plain
    text = "a<|begin|>b<|end_of_text|>"
    ids = tokenizers.encode(ours, text.encode())
    assert ours.decode(ids.tolist()) == text and max(ids) < 1499
    (tmp_path / "a.txt").write_text("words of a text " * 40)
    words = ["--source", f"text:{tmp_path}/a.txt", "--out", str(tmp_path / "out")]
    assert prepare.main([*words, "--tokenizer", f"json:{tmp_path}/tokenizer.json"]) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["tokenizer"]["eot"] == 1500 and tokenizers.from_manifest(manifest).n_vocab == 1501
    assert tokenizers.text_lengths(ours)[ids].sum() == len(text)


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path, trained):
    """Catches tokens that silently differ from the library's."""
    theirs = hf(dict(tokenizers.load(f"bpe:{trained}")._mergeable_ranks), tokenizers.GPT2_PATTERN)
    good = json.loads(theirs.to_str())
    merges = good["model"]["merges"]

    def refusal(**more):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(good | more))
        with pytest.raises(UserError) as error:
            tokenizers.load(f"json:{path}")
        return str(error.value).removeprefix(f"tokenizer 'json:{path}': ")

    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    for more, message in [
        (dict(normalizer={"type": "NFC"}), "unsupported normalizer NFC: tokens would not decode to the original"),
        (dict(model=good["model"] | {"type": "WordPiece"}), "unsupported model WordPiece; only byte-level BPE"),
        (dict(model=good["model"] | {"byte_fallback": True}), "unsupported model BPE with byte fallback, as in Senten"),
        (dict(model=good["model"] | {"merges": merges[::-1]}),
         "unsupported merges: tiktoken needs merges in the order of their token ids"),
        (dict(model=good["model"] | {"vocab": {"é五": 0}}), "token 'é五' does not use GPT-2's mapping of bytes"),
        (dict(model=good["model"] | {"vocab": {"a": 0}}), "255 of the 256 single bytes have no id (first: 0)"),
        (dict(pre_tokenizer=byte_level), "unsupported add_prefix_space: tokens would decode to text with"),
        (dict(pre_tokenizer={"type": "Whitespace"}), "unsupported pre-tokenizer Whitespace: tiktoken splits text with"),
        (dict(model={}), "unsupported model None; only byte-level BPE"),
        (dict(model=[]), "not a tokenizer.json (AttributeError: "),
    ]:  # fmt: skip
        assert refusal(**more).startswith(message)
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(UserError, match=r"not a tokenizer\.json \(JSONDecodeError"):
        tokenizers.load(f"json:{tmp_path}/tokenizer.json")
    with pytest.raises(UserError, match=r"'json:.*none': No such file"):
        tokenizers.load(f"json:{tmp_path}/none")
    with pytest.raises(
        UserError, match=r"unknown tokenizer 'llama/tokenizer\.model'; for a SentencePiece model, use sp:llama"
    ):
        tokenizers.load("llama/tokenizer.model")


def test_a_text_too_small_for_its_vocabulary_is_refused(tmp_path, capsys):
    """Catches a rank file that silently has fewer ids than requested."""
    (tmp_path / "a.txt").write_text("abab " * 9)
    words = ["--source", f"text:{tmp_path}/a.txt", "--out", str(tmp_path / "a.bpe")]
    assert train_tokenizer.main([*words, "--vocabulary", "4096"]) == 2
    said = capsys.readouterr().err
    assert f"error: 'text:{tmp_path}/a.txt' has too little text for 4096 ids; use --vocabulary 260" in said
    assert not (tmp_path / "a.bpe").exists()
    assert train_tokenizer.main([*words, "--vocabulary", "260"]) == 0
    assert tokenizers.load(f"bpe:{tmp_path}/a.bpe").n_vocab == 260
    with pytest.raises(UserError, match=r"vocabulary=256: must be at least 257 \(256 bytes and the end of text"):
        train_tokenizer.Arguments("x", vocabulary=256)


def test_a_sample_covers_the_whole_text(tmp_path, monkeypatch):
    """Catches a tokenizer trained only on the beginning of a large text."""
    monkeypatch.setattr(train_tokenizer.sources, "LEAST_UNIT_BYTES", 100)
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(f"{n:02}" * 60)
    sample = lambda size: [*train_tokenizer._sample(
        train_tokenizer.Arguments("x", f"text:{tmp_path}/*.txt", sample_bytes=size))]  # fmt: skip
    assert len(sample(10**6)) == 40
    assert [text[:2] for text in sample(40 * 120 // 4)] == [f"{n:02}" for n in range(0, 40, 4)]
    assert np.sum([len(text) for text in sample(1200)]) == 1200
