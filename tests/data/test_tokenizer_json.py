"""A damaged or hostile tokenizer.json is refused in one line. tests/data/test_tokenizers.py compares good ones."""

import json

import pytest

from data import hf_json, tokenizers
from utils import UserError

VOCAB = {letter: byte for byte, letter in hf_json.byte_letters().items()}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def load(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return tokenizers.load(f"json:{tmp_path}/tokenizer.json")


def with_pattern(pattern: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split, BYTE_LEVEL | {"use_regex": False}]
    return with_model({}) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def with_model(tokens: dict, added=(), merges=()) -> dict:
    model = {"type": "BPE", "vocab": VOCAB | tokens, "merges": [*merges]}
    return {"model": model, "pre_tokenizer": BYTE_LEVEL, "added_tokens": [*added]}


@pytest.mark.parametrize("pattern", [tokenizers.GPT2_PATTERN, LLAMA3, r"(?s:.+)", r"\p{L}++|\P{L}"])
def test_a_pattern_that_matches_all_text_is_read(tmp_path, pattern):
    """Catches a check that refuses published tokenizers."""
    encoding = load(tmp_path, with_pattern(pattern))
    text = "hello, world! 42\n"
    assert encoding.decode(tokenizers.encode(encoding, text.encode()).tolist()) == text


@pytest.mark.parametrize("pattern, message", [
    (r"\w+", r"unsupported pattern '\\w+': it does not match '\x00', so tokens would lose it"),
    (r".+", r"unsupported pattern '.+': it does not match '\n', so tokens would lose it"),
    (r"\S\S+|\s+", r"unsupported pattern '\\S\\S+|\\s+': it does not match '\x00', so tokens would lose it"),
    (r"(?<=b)a|[^a]", "unsupported pattern '(?<=b)a|[^a]': it does not match 'a', so tokens would lose it"),
    ("[\\s\\S]{2}", r"unsupported pattern '[\\s\\S]{2}': it does not match "),
    ("", "unsupported pattern '': it matches the empty text"),
    ("a*", "unsupported pattern 'a*': it matches the empty text"),
    ("[", "not a tokenizer.json (ValueError: "),
    ("(" * 5000 + ")" * 5000, "not a tokenizer.json (ValueError: "),
    (5, "not a tokenizer.json (TypeError: "),
])  # fmt: skip
def test_a_pattern_that_loses_text_is_refused(tmp_path, pattern, message):
    """Catches training on text without its spaces, and tiktoken's panic at an empty match."""
    with pytest.raises(UserError) as error:
        load(tmp_path, with_pattern(pattern))
    assert str(error.value).startswith(f"tokenizer 'json:{tmp_path}/tokenizer.json': {message}")


@pytest.mark.parametrize("contents, message", [
    (with_model({"ab": -1}), "a token has the id -1; ids must be whole numbers from 0 to 4,194,303"),
    (with_model({"ab": 2**40}), "a token has the id 1099511627776; ids must be"),
    *[(with_model({"ab": id}), f"a token has the id {id!r}; ids must be") for id in (True, 1.5, "x", None)],
    (with_model({"ab": 97}), "several tokens have the id 97; each must have its own"),
    (with_model({}, [{"content": "<x>", "id": 97}]), "several tokens have the id 97; each must have its own"),
    (with_model({}, [{"content": "<x>", "id": -1}]), "a token has the id -1; ids must be"),
    (with_model({}, [{"content": "", "id": 300}]), "a token is empty"),
    (with_model({"": 300}), "a token is empty"),
    *[(with_model({}, added), "not a tokenizer.json (") for added in ([5], ["ab"], [{}], [{"content": [], "id": 1}],
      [{"content": "\ud800", "id": 300}])],
    *[(with_model({}, (), merges), "not a tokenizer.json (") for merges in ([5], [["a"]], [["a", []]], ["a"], ["a b"])],
    ("[" * 100_000, "not a tokenizer.json (RecursionError: "),
    ('{"model": ' + "9" * 5000 + "}", "not a tokenizer.json (ValueError: "),
    ("5", "not a tokenizer.json (AttributeError: "),
])  # fmt: skip
def test_a_damaged_vocabulary_is_refused(tmp_path, contents, message):
    """Catches a panic of tiktoken, an id that overflows, and arrays with an entry for each of a trillion ids."""
    with pytest.raises(UserError) as error:
        load(tmp_path, contents)
    assert str(error.value).startswith(f"tokenizer 'json:{tmp_path}/tokenizer.json': {message}")
