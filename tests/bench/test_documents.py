"""Test what bench.documents counts: the blocks of queries and keys that a kernel does not skip."""

import json

import numpy as np
import pytest

from bench import documents
from data import prepare
from pipeline.documents import document_order


def brute_force(segments_T, order_T, n: int, block: int) -> np.ndarray:
    """Compare every two blocks, and say which device computes them in which step."""
    found, size = np.zeros((n, n), int), len(order_T) // (2 * n)
    device = lambda place: min(place // size, 2 * n - 1 - place // size)
    for query in range(0, len(order_T), block):
        for key in range(0, query + 1, block):
            ours, theirs = (segments_T[order_T[at : at + block]] for at in (query, key))
            if ours.min() <= theirs.max() and theirs.min() <= ours.max():
                found[device(query), (device(query) - device(key)) % n] += 1
    return found


def test_blocks_without_a_common_document_are_not_counted():
    """Catches blocks of later keys, blocks that are counted for the device of the keys, and all pairs of blocks."""
    n, T, block = 2, 4096, 256
    rng = np.random.default_rng(0)
    segments_T = np.sort(rng.integers(1, 9, T))
    plain, [dealt] = np.arange(T), np.asarray(document_order(segments_T[None], n))
    for order_T in (plain, dealt):
        found = documents.blocks_computed(segments_T, order_T, n)
        assert np.array_equal(found, brute_force(segments_T, order_T, n, block))
    assert documents.blocks_computed(np.ones(T), plain, n).sum() == (T // block) * (T // block + 1) // 2 > found.sum()


def test_the_step_takes_as_long_as_its_busiest_device(tmp_path, capsys):
    """Catches a time that ignores the documents, and one of all of the step instead of its attention."""
    ids = [np.full(length, 7) for length in (900, 5100, 2300, 4700, 1500, 3900)]
    prepare.from_ids(ids * 2, str(tmp_path / "tokens"), vocab_size=9, eot=8, validation_ids=ids)
    words = ["--path", str(tmp_path / "tokens"), "--model", "dense_124m", "--topology", "v5e:4x4", "--context", "4"]
    assert documents.main([*words, "--seq_len", "8192", "--rows", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, positions, dealt = (found[name] for name in ("one document", "positions", "documents"))
    assert one["attention_s"] > positions["attention_s"] >= dealt["attention_s"] > 0
    for layout in (positions, dealt):
        assert one["step_s"] - layout["step_s"] == pytest.approx(one["attention_s"] - layout["attention_s"])
    assert positions["busiest"] > dealt["busiest"] == pytest.approx(1, abs=0.01)
