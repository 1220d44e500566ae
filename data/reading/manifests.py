"""Check that the manifest.json of a directory of tokens has the form that `prepare.py` writes."""

import os

from utils import UserError

FORMAT = 1  # version of manifest.json


def check(manifest, place: str) -> None:
    """Raises: UserError that names the first entry that is missing or has another type than `prepare` writes."""

    def refuse(what: str):
        raise UserError(f"{place} is damaged: {what}; restore it, or run data.prepare --overwrite")

    def check_types(values, where: str, **kinds) -> None:
        if not isinstance(values, dict):
            refuse(f"{where.rstrip('.') or 'it'} is {values!r:.60}")
        for name, kind in kinds.items():
            value = values.get(name)
            of_kind = isinstance(value, kind) and not isinstance(value, bool) and value != []
            if name not in values or not of_kind or (kind is int and value < 0):
                refuse(f"{where}{name} is {value!r:.60}" if name in values else f"{where}{name} is missing")

    check_types(manifest, "")
    if manifest.get("format") != FORMAT:
        raise UserError(f"{place} has format {manifest.get('format')!r:.60}, but this version reads {FORMAT}; "
                        "regenerate it with data.prepare --overwrite")  # fmt: skip
    check_types(manifest, "", dtype=str, unigram_nats=int | float, bigram_nats=int | float)
    check_types(manifest.get("arguments"), "arguments.", source=str)
    tokenizer = manifest.get("tokenizer")
    check_types(tokenizer, "tokenizer.", name=str, fingerprint=str | None, vocabulary=int, eot=int)
    if manifest["dtype"] not in ("uint16", "uint32") or tokenizer["eot"] >= tokenizer["vocabulary"]:
        refuse(f"dtype {manifest['dtype']!r}, vocabulary {tokenizer['vocabulary']}, end of text {tokenizer['eot']}")
    check_types(manifest.get("splits"), "splits.", train=dict, val=dict)
    for name, split in manifest["splits"].items():
        check_types(split, f"splits.{name}.", documents=int, text_bytes=int | None, shards=list)
        for number, row in enumerate(split["shards"]):
            where = f"splits.{name}.shards[{number}]."
            check_types(row, where, tokens=int, documents=int)
            beside = [(f"{what}.", row[what]) for what in ("weights", "begins") if row.get(what) is not None]
            for what, file in [("", row), *beside]:
                check_types(file, where + what, file=str, sha256=str)
                if os.path.basename(file["file"]) != file["file"] or file["file"] in ("", ".", ".."):
                    refuse(f"{where}{what}file is {file['file']!r:.60}, which is not the name of a file beside it")
