"""The files of a data set on the Hugging Face hub, at one commit: its own words say which belong to a configuration."""

import fnmatch
import json
import os
import urllib.parse

from data import files
from data.files import File
from errors import UserError

ENDINGS = {"parquet": (".parquet",), "jsonl": (".jsonl", ".json", ".ndjson"), "text": (".txt", ".md")}
READABLE = tuple(
    ending + packed for endings in ENDINGS.values() for ending in endings for packed in ("", ".gz", ".zst")
)
SPLIT = "train"  # what a data set calls the part to train on; ours are made of it


def file_kind(file: File) -> str:
    """How a file of a data set is read, by its ending."""
    name = file.name.removesuffix(".gz").removesuffix(".zst")
    return next(kind for kind, endings in ENDINGS.items() if name.endswith(endings))


def dataset_files(name: str) -> list[File]:
    """List the files of NAME or NAME:CONFIG, of its split `train`.

    They are read from the hub as they are needed, by ranges, each worker its own; nothing is kept. HF_ENDPOINT names
    another hub, HF_TOKEN opens what is not public.
    Source: https://huggingface.co/docs/hub/datasets-manual-configuration, for `configs` and `data_files`.
    """
    name, _, config = name.partition(":")
    about = f"{files.hub_url()}api/datasets/{urllib.parse.quote(name)}"
    with files.open_url(f"{about}?full=true") as answer:
        said = json.load(answer)
    commit = said["sha"]
    there = [one["rfilename"] for one in said["siblings"] if one["rfilename"].endswith(READABLE)]
    patterns = _patterns(name, config, (said.get("cardData") or {}).get("configs"))
    chosen = sorted({path for path in there for pattern in patterns if _matches(path, pattern)})
    if not patterns:
        chosen = sorted(path for path in there if SPLIT in path) or sorted(there)
    if not chosen:
        raise UserError(f"hf:{name}: none of its {len(said['siblings'])} files is {' or '.join(patterns) or 'text'}, "
                        "and ends in .parquet, .jsonl or .txt; name some with parquet:ADDRESS")  # fmt: skip
    sizes = _sizes(about, commit, chosen)
    root = f"{files.hub_url()}datasets/{urllib.parse.quote(name)}/resolve/{commit}/"
    return [File(path, root + urllib.parse.quote(path), sizes[path], commit) for path in chosen]


def _patterns(name: str, config: str, configs: list[dict] | None) -> list[str]:
    """The globs of a configuration's files for training; none if there are no configurations."""
    if not configs:
        if config:
            raise UserError(f"hf:{name} has no configurations; leave {config!r} out")
        return []
    known = [one["config_name"] for one in configs]
    wanted = config or next((one["config_name"] for one in configs if one.get("default")), None)
    wanted = wanted or ("default" if "default" in known else known[0] if len(known) == 1 else None)
    if wanted not in known:
        asked = f"has no configuration {config!r}" if config else "has several configurations"
        raise UserError(f"hf:{name} {asked}; use hf:{name}:CONFIG with one of {', '.join(known[:20])}")
    found = next(one for one in configs if one["config_name"] == wanted).get("data_files")
    if isinstance(found, list) and found and isinstance(found[0], dict):
        found = next((one["path"] for one in found if one["split"] == SPLIT), None)
    if not found:
        raise UserError(f"hf:{name}:{wanted} names no files of a split {SPLIT!r}; name some with parquet:ADDRESS")
    return [found] if isinstance(found, str) else list(found)


def _matches(path: str, pattern: str) -> bool:
    """As a shell does: * stays in a directory, ** does not."""
    if "**" in pattern:
        return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.replace("**/", ""))
    same_depth = pattern.count("/") == path.count("/")
    return same_depth and all(map(fnmatch.fnmatchcase, path.split("/"), pattern.split("/")))


def _sizes(about: str, commit: str, paths: list[str]) -> dict[str, int]:
    """The size of each file in bytes, asked of each directory once."""
    sizes = {}
    for folder in sorted({os.path.dirname(path) for path in paths}):
        address = f"{about}/tree/{commit}" + (f"/{urllib.parse.quote(folder)}" if folder else "")
        while address:
            with files.open_url(address) as answer:
                sizes |= {one["path"]: one["size"] for one in json.load(answer) if one["type"] == "file"}
                link = answer.headers.get("Link") or ""
            address = link.partition("<")[2].partition(">")[0] if 'rel="next"' in link else ""
    return {path: sizes[path] for path in paths}
