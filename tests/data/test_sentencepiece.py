"""A SentencePiece model as a tokenizer: its ids and text, and models that lose text."""

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import dataset
from data import prepare, tokenizers
from utils import UserError

needs_package = pytest.mark.extra("sentencepiece")
TEXTS = [
    "  two  spaces\tand\r\n a tab ",
    "no space in front",
    "漢字 🙂 e\u0301 \u2126 </s> <s>",
    "def f():\n    pass\n",
    "",
]
EXACT = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def train_model(path, **how):
    import sentencepiece  # here, because it is an extra

    lines, model = Path(__file__).read_text().splitlines(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=400,
                                             minloglevel=2, hard_vocab_limit=False, **how)  # fmt: skip
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@needs_package
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("end", [2, -1])
def test_ids_are_the_model_s_and_decode_to_the_text(tmp_path, kind, prefix, end):
    """Catches ids shifted by special pieces, a wrong end of text, lost spaces and bytes, and a model that other
    processes cannot load."""
    own = train_model(tmp_path / "m.model", model_type=kind, add_dummy_prefix=prefix, eos_id=end, **EXACT)
    encoding = pickle.loads(pickle.dumps(tokenizers.load(f"sp:{tmp_path}/m.model")))
    assert encoding.eot_token == (2 if end == 2 else own.vocab_size())
    assert encoding.n_vocab == own.vocab_size() + (end == -1)
    for text in TEXTS:
        ids = tokenizers.encode(encoding, text.encode())
        assert ids.tolist() == own.encode(text) == encoding.encode_ordinary(text) and encoding.eot_token not in ids
        assert encoding.decode(ids.tolist()) == text
        streamed = b"".join(map(encoding.decode_single_token_bytes, ids.tolist()))
        assert streamed == (b" " * (prefix and text != "") + text.encode())
        assert tokenizers.text_lengths(encoding)[ids].sum() == len(streamed)


@needs_package
def test_prepared_tokens_are_the_model_s(tmp_path):
    """Catches workers with another tokenizer, a manifest without it, and a model changed after its tokens were made."""
    own = train_model(tmp_path / "m.model", **EXACT)
    (tmp_path / "texts").mkdir()
    for n, text in enumerate(TEXTS * 3):
        (tmp_path / f"texts/{n:02}.txt").write_bytes(text.encode())
    words = ["--source", f"text:{tmp_path}/texts/*.txt", "--tokenizer", f"sp:{tmp_path}/m.model", "--val-share", "0.3"]
    for workers in "12":
        assert prepare.main([*words, "--workers", workers, "--out", str(tmp_path / workers)]) == 0
    read = lambda n, split: dataset.load(str(tmp_path / n)).splits[split].read(0, 10**6)
    streams = [np.concatenate([read(n, "train"), read(n, "val")]) for n in "12"]
    assert np.array_equal(*streams)
    documents = [own.decode(part.tolist()) for part in np.split(streams[0], np.flatnonzero(streams[0] == 2))[1:]]
    assert sorted(documents) == sorted(TEXTS * 3)
    manifest = dataset.load(str(tmp_path / "1")).manifest
    assert tokenizers.from_manifest(manifest).n_vocab == own.vocab_size() == manifest["tokenizer"]["vocabulary"]
    train_model(tmp_path / "m.model", model_type="bpe", **EXACT)
    with pytest.raises(UserError, match="has changed since the tokens were prepared"):
        tokenizers.from_manifest(manifest)


@needs_package
@pytest.mark.parametrize("how", [
    {}, EXACT | {"byte_fallback": False}, EXACT | {"normalization_rule_name": "nfkc"},
    EXACT | {"remove_extra_whitespaces": True},
])  # fmt: skip
def test_a_model_that_loses_text_is_refused(tmp_path, how):
    """Catches text that silently decodes to other text."""
    train_model(tmp_path / "m.model", **how)
    with pytest.raises(UserError, match=r"m\.model': tokens decode to different text: '.*' becomes '.*'; train it "):
        tokenizers.load(f"sp:{tmp_path}/m.model")


@needs_package
def test_an_invalid_model_file_is_refused(tmp_path):
    """Catches a traceback of a C++ library."""
    (tmp_path / "m.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"m\.model': not a SentencePiece model"):
        tokenizers.load(f"sp:{tmp_path}/m.model")
    with pytest.raises(UserError, match=r"other\.model': No such file"):
        tokenizers.load(f"sp:{tmp_path}/other.model")


def test_without_the_package_the_error_names_the_install_command(tmp_path, monkeypatch):
    """Catches a traceback, and an import of the package for those who do not use it."""
    (tmp_path / "m.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"needs the package sentencepiece; install it with: make extra-sentencepiece"):
        tokenizers.load(f"sp:{tmp_path}/m.model")
