"""A search of the order for the least item looks at few of many."""

from math import inf

import pytest

from halfmoon_scheduling.cluster.linear_order import LinearOrder, OrderedItem, Triple


def time_of(item: OrderedItem, weights: Triple) -> float:
    return item.value + sum(w * s for w, s in zip(weights, item.slopes, strict=True))


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
