"""Read the training split of a data set on the Hugging Face hub with the library `datasets`, without storing it."""

import functools
from collections.abc import Callable, Iterator

from data import files
from data.files import File
from utils import UserError

SPLIT = "train"  # the split of a data set that our train and val splits are made of
BATCH_ROWS = 1000


def find_dataset(name: str) -> File:
    """Describe NAME or NAME:CONFIG as one file: its size is that of its files on the hub, its version a commit.

    The environment variables of huggingface_hub apply: HF_ENDPOINT selects another hub, HF_TOKEN gives access.
    """
    repository, _, config = name.partition(":")
    try:
        import datasets  # an extra
        import huggingface_hub
    except ImportError as error:
        raise UserError(f"hf:{name} needs the package datasets; install it with: make extra-datasets") from error
    hub = huggingface_hub.HfApi()
    # `datasets` retries for minutes without a network, so ask first.
    about = _ask(name, lambda: hub.dataset_info(repository, files_metadata=True, timeout=files.REQUEST_S))
    sizes = {f"hf://datasets/{repository}@{about.sha}/{one.rfilename}": one.size or 0 for one in about.siblings}
    options = {"name": config or None, "revision": about.sha}
    builder = _ask(name, lambda: datasets.load_dataset_builder(repository, **options))
    paths = (builder.config.data_files or {}).get(SPLIT, [])
    size = sum(sizes.get(path, 0) for path in paths) or sum(sizes.values())
    return File(name, f"hf://{name}", max(size, 1), about.sha)


def read_tables(file: File, start: int, stop: int) -> Iterator:
    """Yield tables (pyarrow) of the rows that begin in a range of bytes. Every row is in exactly one of several ranges.

    Each of the data set's n files counts as size / n bytes, and so does each row group in a file of Parquet. A file of
    another format is one piece.
    """
    rows = open_rows(file.name, file.version)
    n = rows.num_shards
    for number in range(start * n // file.size, (stop * n - 1) // file.size + 1):
        pieces = rows.shard(n, number).reshard()
        count = pieces.num_shards
        for piece in range(count):
            if start <= (number * count + piece) * file.size // (n * count) < stop:
                yield from pieces.shard(count, piece).with_format("arrow").iter(BATCH_ROWS)


@functools.cache
def open_rows(name: str, commit: str):
    """Return the rows of NAME or NAME:CONFIG at a commit, a `datasets.IterableDataset`."""
    import datasets

    repository, _, config = name.partition(":")
    options = {"name": config or None, "revision": commit, "split": SPLIT, "streaming": True}
    return _ask(name, lambda: datasets.load_dataset(repository, **options))


def _ask(name: str, work: Callable):
    """Return work(). Raises: UserError if it fails, or does not end in time."""
    try:
        return files.wait_at_most(files.ANSWER_S, work)
    except TimeoutError as error:
        raise UserError(f"hf:{name}: the hub did not answer within {files.ANSWER_S:g} s") from error
    except Exception as error:  # each layer of the library has its own errors
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"hf:{name}: {type(error).__name__}: {reason}; check the name, the network and HF_TOKEN, or download a "
            "copy and pass it as text:FILE, jsonl:FILE or parquet:FILE"
        ) from error
