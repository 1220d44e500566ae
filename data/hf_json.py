"""Load a Hugging Face tokenizer.json of the byte-level BPE kind (Llama 3, GPT-2 and most others) into tiktoken.

The library tokenizers finds the same ids, but took 8 times as long for 4.7 MB of Python with 4,000 ids, in one thread.
"""

import collections
import itertools
import json

import regex  # of tiktoken, which splits text with a similar engine
import tiktoken

from utils import UserError

ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
)  # names of the end-of-text token
MOST_IDS = 2**22  # arrays have one entry per id


def load(path: str, end_name: str, gpt2_pattern: str) -> tiktoken.Encoding:
    """Read a tokenizer.json. Its end of text, called `end_name`, is the first of ENDS that it has, else a new last id.

    Raises: UserError with the reason, if it is not a tokenizer.json or if tiktoken would produce different tokens.
    """
    try:
        with open(path, encoding="utf-8") as file:
            contents = json.load(file)
        return parse_tokenizer(f"json:{path}", contents, end_name, gpt2_pattern)
    except OSError as error:
        raise UserError(f"tokenizer 'json:{path}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise UserError(f"tokenizer 'json:{path}': {error}") from error
        raise UserError(f"tokenizer 'json:{path}': not a tokenizer.json ({type(error).__name__}: {error})") from error


def parse_tokenizer(name: str, contents: dict, end_name: str, gpt2_pattern: str) -> tiktoken.Encoding:
    """Build an encoding from the contents of a tokenizer.json."""
    if contents.get("normalizer"):
        raise UserError(f"unsupported normalizer {contents['normalizer'].get('type')}: tokens would not decode to the "
                        "original text")  # fmt: skip
    special = {one["content"]: one["id"] for one in contents.get("added_tokens") or []}
    ranks = ranks_of(contents["model"], special)
    check_ids(ranks, special)
    pattern = _split_pattern(contents.get("pre_tokenizer") or {}, gpt2_pattern)
    end = next((special.pop(end) for end in ENDS if end in special), max([*ranks.values(), *special.values()]) + 1)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special | {end_name: end})
    check_round_trip(encoding, pattern)
    return encoding


def check_ids(ranks: dict[bytes, int], special: dict[str, int]) -> None:
    """Raises: UserError if tiktoken would panic: at an empty token, at an id that is no id, and at one given twice."""
    ids = [*ranks.values(), *special.values()]
    if wrong := [id for id in ids if type(id) is not int or not 0 <= id < MOST_IDS]:
        raise UserError(f"a token has the id {wrong[0]!r:.60}; ids must be whole numbers from 0 to {MOST_IDS - 1:,}")
    if len(set(ids)) < len(ids):
        twice = next(id for id, n in collections.Counter(ids).items() if n > 1)
        raise UserError(f"several tokens have the id {twice}; each must have its own")
    if b"" in ranks or "" in special:
        raise UserError("a token is empty")


def check_round_trip(encoding: tiktoken.Encoding, pattern: str) -> None:
    """Raises: UserError if tiktoken would lose text that the pattern does not match, or panic at an empty match."""
    characters = [chr(i) for i in (*range(0x250), *range(0x250, 0xD800, 37), *range(0xE000, 0x110000, 997))]
    pairs = [a + b for a in characters[:128:3] for b in characters[:128:3]]
    for text in ("".join(characters), " ".join(characters), "\n".join(pairs), *characters[:128]):
        try:
            matches = [match[0] for match in regex.finditer(pattern, text, timeout=10)]
        except (regex.error, TimeoutError) as error:
            raise UserError(f"unsupported pattern {pattern!r:.60}: {error}") from error
        if "" in matches:
            raise UserError(f"unsupported pattern {pattern!r:.60}: it matches the empty text")
        kept = encoding.decode(encoding.encode_to_numpy(text, disallowed_special=()).tolist())
        if kept != text:
            lost = next(a for a, b in itertools.zip_longest(text, kept) if a != b)
            raise UserError(f"unsupported pattern {pattern!r:.60}: it does not match {lost!r}, so tokens would lose it")


def ranks_of(model: dict, special: dict[str, int]) -> dict[bytes, int]:
    """Map the bytes of each token to its id. Raises: UserError if merging by id does not follow the merges."""
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback, as in SentencePiece" if model.get("byte_fallback") else model.get("type")
        raise UserError(f"unsupported model {kind}; only byte-level BPE is supported")
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    if unknown := next((t for t in model["vocab"] if t not in special and not set(t) <= byte_of.keys()), None):
        raise UserError(f"token {unknown!r} does not use GPT-2's mapping of bytes to Unicode, so this is not a "
                        "byte-level BPE")  # fmt: skip
    to_bytes = lambda token: bytes(byte_of[letter] for letter in token)
    ranks = {to_bytes(token): rank for token, rank in model["vocab"].items() if token not in special}
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{len(missing)} of the 256 single bytes have no id (first: {missing[0]})")
    pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    merged = list(dict.fromkeys(ranks[to_bytes(a + b)] for a, b in pairs))
    if any(a > b for a, b in itertools.pairwise(merged)):
        raise UserError("unsupported merges: tiktoken needs merges in the order of their token ids")
    return ranks


def byte_letters() -> dict[int, str]:
    """Map each byte to a letter: itself if printable, else one from U+0100 on. Source: GPT-2, encoder.py,
    `bytes_to_unicode`."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _split_pattern(pre_tokenizer: dict, gpt2_pattern: str) -> str:
    """Return the regular expression that splits text before merging."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise UserError("unsupported add_prefix_space: tokens would decode to text with an extra space")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return gpt2_pattern
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        split = steps[0]
        if "Regex" in split["pattern"] and split["behavior"] == "Isolated" and not split.get("invert"):
            return split["pattern"]["Regex"]
    raise UserError(f"unsupported pre-tokenizer {' then '.join(map(str, kinds))}: tiktoken splits text with a single "
                    "regular expression")  # fmt: skip
