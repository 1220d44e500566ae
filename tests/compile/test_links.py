"""Which links a collective uses, and how several collectives share them. Bytes are derived by hand."""

import numpy as np
import pytest

from plan.chips import links
from plan.chips.links import Torus

CLOSED, OPEN = Torus((4, 4, 4), (True, True, True)), Torus((4, 4, 4), (False, False, False))
CHIPS = np.array([*np.ndindex(4, 4, 4)])


def lines(axis: int) -> np.ndarray:
    """Return the chips of each line along a torus axis, [line, chip, torus axis]."""
    return np.moveaxis(CHIPS.reshape(4, 4, 4, 3), axis, 2).reshape(16, 4, 3)


def test_a_message_takes_the_shortest_way():
    """Catches a route the long way around a wrapped axis, or over the missing link of an open one."""
    start, end = np.array([[0, 1, 2]]), np.array([[3, 1, 2]])
    around, along = (links.permute_load(torus, start, end, 7) for torus in (CLOSED, OPEN))
    assert around.sum() == 7 and around[0, 0, 0, 1, 2] == 7  # one link down, from x=0
    assert along.sum() == 3 * 7 and all(along[0, 1, x, 1, 2] == 7 for x in range(3))  # three up


@pytest.mark.parametrize("torus, busiest", [(CLOSED, 1 / 2), (OPEN, 1)], ids=["closed", "open"])
def test_a_gather_uses_both_directions_of_a_wrapped_axis(torus, busiest):
    """Catches a line without wraparound that is as fast as a ring."""
    load = links.gather_load(torus, lines(1), 12.0)
    assert load.max() == 12 * busiest
    assert not load[0].any() and not load[2].any()


def test_a_gather_over_a_whole_torus_uses_all_its_links():
    """Catches a gather over three axes as slow as one over a ring: StrategyND uses six links, a ring two."""
    everywhere = CHIPS[None]
    assert links.gather_load(CLOSED, everywhere, 12.0).max() == 12 / 6
    assert links.gather_load(OPEN, everywhere, 12.0).max() == 12 / 3
    assert links.gather_load(CLOSED, everywhere, 12.0, ring=True).max() == 12 / 2


def test_a_group_that_cuts_a_torus_axis_is_one_ring():
    """Catches 5 links for fsdp=32,tensor=2 on 4x4x4: a split axis is one ring, 90 GB/s on v4, not 225."""
    groups = np.moveaxis(CHIPS.reshape(2, 2, 16, 3), 1, 0).reshape(2, 32, 3)  # every second plane of x
    assert links.whole_axes(CLOSED, groups) is None
    assert links.gather_load(CLOSED, groups, 12.0).max() == 12 / 2


def test_neighbours_two_links_apart_share_them():
    """Catches a stride that costs nothing: two rings, each of every second chip, use the same links."""
    strided = lines(2).reshape(16, 2, 2, 3).swapaxes(1, 2).reshape(32, 2, 3)
    assert links.gather_load(OPEN, strided, 12.0).max() == 2 * 12


def test_an_exchange_of_all_with_all_is_bound_by_the_middle():
    """Catches an all-to-all on a line as fast as a gather of its bytes: 4 chunks cross the middle."""
    load = links.all_to_all_load(OPEN, lines(0), 4.0)  # a chunk is 1
    assert load[0, 1, 1].max() == 4 and load[0, 1, 0].max() == 3


def test_collectives_share_a_link_fairly():
    """Catches permutes that slow each other down without a common link, or do not with one."""
    right = lambda chip: (np.array([chip]), np.array([[chip[0] + 1, chip[1], chip[2]]]))
    one, same, apart = (links.permute_load(OPEN, *right(chip), 6.0) for chip in ((0, 0, 0), (0, 0, 0), (0, 1, 0)))
    assert links.share_bandwidth([one], 3.0) == [0.5]
    assert links.share_bandwidth([one, same], 3.0) == [0.25, 0.25]
    assert links.share_bandwidth([one, apart], 3.0) == [0.5, 0.5]
    three_links = links.permute_load(OPEN, np.array([[0, 0, 0]]), np.array([[2, 0, 0]]), 6.0)
    beside = links.permute_load(OPEN, np.array([[1, 0, 0]]), np.array([[2, 0, 0]]), 6.0)
    shares = links.share_bandwidth(
        [one, three_links, beside], 3.0
    )  # the second is limited equally on both of its links
    assert shares == pytest.approx([0.25, 0.25, 0.25])


def test_transfers_within_a_chip_use_no_link():
    """Catches a division by zero, or a wait, for two devices on one chip."""
    nothing = links.permute_load(OPEN, np.array([[1, 1, 1]]), np.array([[1, 1, 1]]), 6.0)
    assert links.share_bandwidth([nothing], 3.0) == [np.inf]
