"""A tokenizer.json of Hugging Face's as ranks: of the byte-level BPE kind, which Llama 3, GPT-2 and most others are."""

import itertools
import json

import tiktoken

from errors import UserError

ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
)  # what models call the end of a text


def load(path: str, end_name: str, gpt2_pattern: str) -> tiktoken.Encoding:
    """Read a file; its end of text is one of ENDS that it lists, under the name `end_name`, else the id after the last.

    Raises: UserError for a file that is none, or whose tokens are not those of ranks alone, and why.
    """
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        return parse_tokenizer(f"json:{path}", said, end_name, gpt2_pattern)
    except OSError as error:
        raise UserError(f"tokenizer 'json:{path}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise UserError(f"tokenizer 'json:{path}': {error}") from error
        raise UserError(f"tokenizer 'json:{path}': not a tokenizer.json ({type(error).__name__}: {error})") from error


def parse_tokenizer(name: str, contents: dict, end_name: str, gpt2_pattern: str) -> tiktoken.Encoding:
    """Turn what a tokenizer.json says into an encoding."""
    if contents.get("normalizer"):
        raise UserError(f"it changes text before it cuts it ({contents['normalizer'].get('type')}); tokens would not "
                        "give the text back")  # fmt: skip
    special = {one["content"]: one["id"] for one in contents.get("added_tokens") or []}
    ranks = ranks_of(contents["model"], special)
    pattern = _pattern(contents.get("pre_tokenizer") or {}, gpt2_pattern)
    end = next((special.pop(end) for end in ENDS if end in special), max([*ranks.values(), *special.values()]) + 1)
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special | {end_name: end})


def ranks_of(model: dict, special: dict[str, int]) -> dict[bytes, int]:
    """The id of each token, by its bytes. Raises: UserError if merging by these is not what the merges say."""
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback, as SentencePiece makes it" if model.get("byte_fallback") else model.get("type")
        raise UserError(f"it is a {kind}, not a byte-level BPE")
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    if unknown := next((t for t in model["vocab"] if t not in special and not set(t) <= byte_of.keys()), None):
        raise UserError(f"its token {unknown!r} is not written in the letters of bytes: it is not a byte-level BPE")
    to_bytes = lambda token: bytes(byte_of[letter] for letter in token)
    ranks = {to_bytes(token): rank for token, rank in model["vocab"].items() if token not in special}
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{len(missing)} of the 256 single bytes have no id, first {missing[0]}")
    pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    made = list(dict.fromkeys(ranks[to_bytes(a + b)] for a, b in pairs))
    if any(a > b for a, b in itertools.pairwise(made)):
        raise UserError("its merges are not in the order of their ids, and ranks cannot say so")
    return ranks


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte: itself if it can be seen, else one after U+0100. Source: GPT-2, encoder.py,
    `bytes_to_unicode`."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _pattern(pre_tokenizer: dict, gpt2_pattern: str) -> str:
    """How text is cut before merging."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise UserError("it puts a space before each text; tokens would not give the text back")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return gpt2_pattern
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        split = steps[0]
        if "Regex" in split["pattern"] and split["behavior"] == "Isolated" and not split.get("invert"):
            return split["pattern"]["Regex"]
    raise UserError(f"it cuts text by {' then '.join(map(str, kinds))}, in a way that one pattern cannot say")
