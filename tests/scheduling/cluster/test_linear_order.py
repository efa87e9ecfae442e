"""A search of the order sees every item within the limit, whatever was added and removed."""

from math import inf
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_scheduling.cluster import linear_order
from halfmoon_scheduling.cluster.linear_order import LinearOrder, OrderedItem, Triple

few = st.integers(0, 4).map(float)
slopes = st.tuples(few, few, few)


def time_of(item: OrderedItem, weights: Triple) -> float:
    return item.value + sum(w * s for w, s in zip(weights, item.slopes, strict=True))


@given(
    items=st.lists(st.tuples(few, slopes), max_size=60),
    removed=st.lists(st.integers(0, 59), max_size=60),
    weights=slopes,
    limit=st.sampled_from((0.0, 3.0, 9.0, inf)),
)
def test_no_item_within_the_limit_is_missed(
    items: list[tuple[float, Triple]], removed: list[int], weights: Triple, limit: float
) -> None:
    with mock.patch.multiple(linear_order, _LONG=8, _SHORT=3):
        order: LinearOrder[OrderedItem] = LinearOrder((1.0, 2.0, 3.0))
        present = [OrderedItem(value, each) for value, each in items]
        for item in present:
            order.add(item)
            order.check()
        for i in removed:
            if i < len(present):
                order.remove(present.pop(i))
                order.check()
        seen: list[OrderedItem] = []

        def see(item: OrderedItem) -> float:
            seen.append(item)
            return limit

        order.search(weights, 1.0, limit - 1.0, see)
        within = {id(item) for item in present if time_of(item, weights) <= limit}
        assert within <= {id(item) for item in seen}
        assert len(seen) == len({id(item) for item in seen})


@pytest.mark.parametrize("spread", [0.0, 1e-6])
def test_a_search_for_the_least_visits_few_of_many(spread: float) -> None:
    order: LinearOrder[OrderedItem] = LinearOrder((1.0, 1.0, 1.0))
    items = [OrderedItem(i * 37 % 5003 * 0.01, (1.0 + i * spread, 0.0, 0.0)) for i in range(5003)]
    for item in items:
        order.add(item)
    n_seen, least = 0, inf

    def see(item: OrderedItem) -> float:
        nonlocal n_seen, least
        n_seen += 1
        least = min(least, time_of(item, (100.0, 0.0, 0.0)))
        return least

    assert order.search((100.0, 0.0, 0.0), 0.0, inf, see) == least
    assert least == min(time_of(item, (100.0, 0.0, 0.0)) for item in items)
    assert n_seen < 200
