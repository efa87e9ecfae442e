import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_scheduling.eviction import POLICIES, EvictionPolicy, open_policy


def order(name: str, uses: str) -> str:
    """Insert a to d, then touch the letters of `uses`: the order of eviction."""
    policy: EvictionPolicy[str] = open_policy(name)
    for key in "abcd":
        policy.insert(key)
    for key in uses:
        policy.touch(key)
    return "".join(policy.candidates())


def test_fifo_evicts_in_the_order_of_storing_whatever_is_used() -> None:
    assert order("fifo", "aab") == "abcd"


def test_lru_evicts_the_one_unused_longest() -> None:
    assert order("lru", "aab") == "cdab"


def test_lfu_evicts_the_one_used_least_and_among_equals_the_one_unused_longest() -> None:
    assert order("lfu", "aabdc") == "bdca"


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match=r"no eviction policy 'belady', there are: fifo, lfu, lru"):
        open_policy("belady")


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(steps=st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove"]), st.integers(0, 5))))
def test_every_policy_proposes_exactly_what_is_stored(
    name: str, steps: list[tuple[str, int]]
) -> None:
    policy: EvictionPolicy[int] = open_policy(name)
    stored: set[int] = set()
    for step, key in steps:
        if step == "insert" and key not in stored:
            policy.insert(key)
            stored.add(key)
        elif step != "insert" and key in stored:
            if step == "touch":
                policy.touch(key)
            else:
                policy.remove(key)
                stored.remove(key)
        proposed = list(policy.candidates())
        assert sorted(proposed) == sorted(stored)
        assert len(policy) == len(stored)
