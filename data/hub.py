"""List the files of a data set on the Hugging Face hub at one commit, for a configuration that its card defines."""

import fnmatch
import json
import os
import urllib.parse

from data import files
from data.files import File
from utils import UserError

ENDINGS = {"parquet": (".parquet",), "jsonl": (".jsonl", ".json", ".ndjson"), "text": (".txt", ".md")}
READABLE = tuple(
    ending + packed for endings in ENDINGS.values() for ending in endings for packed in ("", ".gz", ".zst")
)
SPLIT = "train"  # the split of a data set that our train and val splits are made of


def file_kind(file: File) -> str:
    """Return the kind of a file (a key of ENDINGS) from its ending."""
    name = file.name.removesuffix(".gz").removesuffix(".zst")
    return next(kind for kind, endings in ENDINGS.items() if name.endswith(endings))


def dataset_files(name: str) -> list[File]:
    """List the files of the split `train` of NAME or NAME:CONFIG.

    Each worker later reads byte ranges of its files from the hub, without storing them. Set HF_ENDPOINT to use another
    hub, and HF_TOKEN to read private data sets.
    Source: https://huggingface.co/docs/hub/datasets-manual-configuration, for `configs` and `data_files`.
    """
    name, _, config = name.partition(":")
    api = f"{files.hub_url()}api/datasets/{urllib.parse.quote(name)}"
    with files.open_url(f"{api}?full=true") as answer:
        about = json.load(answer)
    commit = about["sha"]
    there = [one["rfilename"] for one in about["siblings"] if one["rfilename"].endswith(READABLE)]
    patterns = _patterns(name, config, (about.get("cardData") or {}).get("configs"))
    chosen = sorted({path for path in there for pattern in patterns if _matches(path, pattern)})
    if not patterns:
        chosen = sorted(path for path in there if SPLIT in path) or sorted(there)
    if not chosen:
        raise UserError(f"hf:{name}: none of its {len(about['siblings'])} files matches {' or '.join(patterns) or '*'} "
                        "and ends in .parquet, .jsonl or .txt; pass the files as parquet:URL")  # fmt: skip
    sizes = _sizes(api, commit, chosen)
    root = f"{files.hub_url()}datasets/{urllib.parse.quote(name)}/resolve/{commit}/"
    return [File(path, root + urllib.parse.quote(path), sizes[path], commit) for path in chosen]


def _patterns(name: str, config: str, configs: list[dict] | None) -> list[str]:
    """Return the globs of a configuration's training files; empty if the data set has no configurations."""
    if not configs:
        if config:
            raise UserError(f"hf:{name} has no configurations; use hf:{name} without {config!r}")
        return []
    known = [one["config_name"] for one in configs]
    wanted = config or next((one["config_name"] for one in configs if one.get("default")), None)
    wanted = wanted or ("default" if "default" in known else known[0] if len(known) == 1 else None)
    if wanted not in known:
        problem = f"has no configuration {config!r}" if config else "has several configurations"
        raise UserError(f"hf:{name} {problem}; use hf:{name}:CONFIG with one of {', '.join(known[:20])}")
    paths = next(one for one in configs if one["config_name"] == wanted).get("data_files")
    if isinstance(paths, list) and paths and isinstance(paths[0], dict):
        paths = next((one["path"] for one in paths if one["split"] == SPLIT), None)
    if not paths:
        raise UserError(f"hf:{name}:{wanted} lists no files for split {SPLIT!r}; pass the files as parquet:URL")
    return [paths] if isinstance(paths, str) else list(paths)


def _matches(path: str, pattern: str) -> bool:
    """Match a path as a shell does: * stays within a directory, ** crosses directories."""
    if "**" in pattern:
        return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.replace("**/", ""))
    same_depth = pattern.count("/") == path.count("/")
    return same_depth and all(map(fnmatch.fnmatchcase, path.split("/"), pattern.split("/")))


def _sizes(about: str, commit: str, paths: list[str]) -> dict[str, int]:
    """Return the size of each file in bytes, with one request per directory (and per page of its listing)."""
    sizes = {}
    for folder in sorted({os.path.dirname(path) for path in paths}):
        address = f"{about}/tree/{commit}" + (f"/{urllib.parse.quote(folder)}" if folder else "")
        while address:
            with files.open_url(address) as answer:
                sizes |= {one["path"]: one["size"] for one in json.load(answer) if one["type"] == "file"}
                link = answer.headers.get("Link") or ""
            address = link.partition("<")[2].partition(">")[0] if 'rel="next"' in link else ""
    return {path: sizes[path] for path in paths}
