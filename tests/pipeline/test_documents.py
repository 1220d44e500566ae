"""Test how packed documents are dealt over CONTEXT: in parts, so that every device has the same work."""

import numpy as np
import pytest

from config import preset, replace
from config.needs import refuse_unused
from pipeline import documents
from tests.test_needs import program
from utils import UserError


def row(lengths) -> np.ndarray:
    """The documents' numbers of a row, [T]; a length below 0 is padding."""
    return np.concatenate([np.full(abs(L), (number if L > 0 else 0)) for number, L in enumerate(lengths, 1)])


def drawn_rows(n: int, count: int = 12) -> np.ndarray:
    """Rows of some documents, with or without padding at the end, whose length is a multiple of 2n: [count, T]."""
    rng, T, found = np.random.default_rng(n), 2 * n * 11, []
    for _ in range(count):
        cuts = np.sort(rng.choice(np.arange(1, T), rng.integers(0, 9), replace=False))
        lengths = np.diff([0, *cuts, T])
        found.append(row([*lengths[:-1], lengths[-1] * rng.choice((-1, 1))]))
    return np.stack(found)


def brute_force(segments_T, order_T, n: int) -> np.ndarray:
    """The pairs of `ring_work`, one by one."""
    found, size = np.zeros((n, n), int), len(order_T) // (2 * n)
    device = lambda place: min(place // size, 2 * n - 1 - place // size)
    for at, query in enumerate(order_T):
        for before, key in enumerate(order_T[: at + 1]):
            if segments_T[query] == segments_T[key] > 0:
                found[device(at), (device(at) - device(before)) % n] += 1
    return found


@pytest.mark.parametrize("n", [1, 3, 4])
def test_each_chunk_has_its_part_of_each_document(n):
    """Catches a position that is dealt twice, a later position before an earlier one of its document, which the causal
    mask would hide, and positions left over that all go to the first chunks."""
    segments_bT = drawn_rows(n)
    for segments_T, order_T in zip(segments_bT, np.asarray(documents.document_order(segments_bT, n)), strict=True):
        assert sorted(order_T) == [*range(len(segments_T))]
        chunk_T = np.arange(len(order_T)) // (len(order_T) // (2 * n))
        for document in np.unique(segments_T):
            own = segments_T[order_T] == document
            assert np.all(np.diff(order_T[own]) > 0)
            parts = np.bincount(chunk_T[own], minlength=2 * n)
            assert parts.max() - parts.min() <= 1 and parts.sum() == np.sum(segments_T == document)
        assert np.array_equal(documents.ring_work(segments_T, order_T, n), brute_force(segments_T, order_T, n))


def test_a_row_with_one_document_stays_as_it_is():
    """Catches another order than that of `sharding.own_chunks`, which balances such a row."""
    [order_T] = np.asarray(documents.document_order(np.ones((1, 24), np.int32), 3))
    assert [*order_T] == [*range(24)]


@pytest.mark.parametrize("mean, zigzag", [(300, 1.8), (4000, 2.2)])
def test_no_device_has_more_than_its_share_in_any_step(mean, zigzag):
    """Catches a layout that balances only totals: 8 devices, rows of 16,384 positions, documents of drawn lengths. With
    chunks of the row, a ring takes about twice as long as with even work."""
    rng, n, T = np.random.default_rng(mean), 8, 16384
    lengths = np.maximum(rng.lognormal(np.log(mean), 1, 200).astype(int), 1)
    segments_T = row(lengths)[:T]
    segments_1T = np.pad(segments_T, (0, T - len(segments_T)))[None]
    [order_T] = np.asarray(documents.document_order(segments_1T, n))
    work_nn = documents.ring_work(segments_1T[0], order_T, n)
    assert np.all(work_nn.max(axis=0) <= 1.05 * work_nn.mean(axis=0))
    assert documents.imbalance(segments_1T, n, by_document=False) > zigzag
    assert documents.imbalance(segments_1T, n, by_document=True) < 1.01


def test_start_up_names_the_work_of_both_layouts():
    """Catches a figure of the wrong layout, and words without the number of devices."""
    assert documents.describe(row([24, 8])[None], 2) == (
        "a ring of 2 devices waits for its busiest one, which has 1.57 times the mean work with "
        "context_layout=positions, 1.00 times with documents, in 1 rows of step 1")  # fmt: skip


@pytest.mark.parametrize("more, says", [
    ({"mesh": "fsdp=2"}, "only a mesh with several devices along context uses it, and the mesh is fsdp=2; add "
                         "context=2 to --mesh or drop it"),
    ({"data.packing": "windows,unmasked"}, "only a batch in which no token attends to other documents uses it, and "
     "data.packing is 'windows,unmasked' here; add --data.packing windows or drop it"),
    ({"model.capacity_factor": 1.0}, "only a model without a capacity uses it, and model.capacity_factor is 1.0 here; "
                                     "add --model.capacity_factor 0 or drop it"),
    ({"model.window": "5"}, "only a model without sliding windows uses it, and model.window is '5' here; "
                            'add --model.window "" or drop it'),
])  # fmt: skip
def test_the_layout_is_refused_where_it_would_change_the_result_or_nothing(more, says):
    """Catches documents that are dealt for a model whose capacity depends on the order of the positions."""
    fixed = {"mesh": "context=2", "data.seq_len": 16, "work.context_layout": "documents"}
    cfg = preset("tiny", **fixed | more)
    with pytest.raises(UserError) as refused:
        refuse_unused(cfg, ["work.context_layout"])
    assert str(refused.value) == f"work.context_layout='documents' has no effect: {says}"
    if "data.packing" not in more:  # a file may have both settings
        assert program(cfg) == program(replace(cfg, **{"work.context_layout": "positions"}))
