import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_scheduling.eviction import POLICIES, EvictionPolicy, open_policy


def order(name: str, uses: str) -> str:
    """Insert a to d, then touch the letters of `uses`: the order of eviction."""
    policy: EvictionPolicy[str] = open_policy(name)
    for depth, key in enumerate("abcd"):
        policy.insert(key, depth)
    for key in uses:
        policy.touch(key)
    return "".join(policy.candidates())


def test_fifo_evicts_in_the_order_of_storing_whatever_is_used() -> None:
    assert order("fifo", "aab") == "abcd"


def test_lru_evicts_the_one_unused_longest() -> None:
    assert order("lru", "aab") == "cdab"


def test_lfu_evicts_the_one_used_least_and_among_equals_the_one_unused_longest() -> None:
    assert order("lfu", "aabdc") == "bdca"


def test_length_aware_evicts_ends_of_prompts_first_among_those_used_equally_often() -> None:
    assert order("length_aware", "dda") == "cbad"


def test_length_aware_later_evicts_starts_of_prompts_first() -> None:
    assert order("length_aware_later", "dda") == "bcad"


def test_patience_evicts_the_one_unused_longest_among_those_used_equally_often() -> None:
    assert order("patience", "aabbccdd") == "abcd"


def test_patience_waits_longer_for_what_was_used_more_often() -> None:
    policy: EvictionPolicy[str] = open_policy("patience")
    policy.insert("old friend")
    for _ in range(3):
        policy.touch("old friend")
    # It was used four times and is worth two and a half times the wait of a passer-by.
    for i in range(100):
        policy.insert(f"passer-by {i}")
    waiting = list(policy.candidates())
    assert waiting[:60] == [f"passer-by {i}" for i in range(60)]
    assert waiting.index("old friend") == 60


def test_patience_learns_that_tails_of_prompts_are_not_used_again() -> None:
    policy: EvictionPolicy[str] = open_policy("patience")
    for i in range(50):
        policy.insert(f"tail {i}", 1, tail=True)
        policy.insert(f"body {i}", 0)
        policy.touch(f"body {i}")
        policy.remove(f"tail {i}")
        policy.remove(f"body {i}")
    for i in range(10):
        policy.insert(f"body {i}", 0)
    policy.insert("tail", 1, tail=True)
    policy.insert("body", 0)
    assert next(policy.candidates()) == "tail"


def test_patience_learns_that_tails_of_prompts_are_used_again() -> None:
    policy: EvictionPolicy[str] = open_policy("patience")
    for i in range(50):
        policy.insert(f"tail {i}", 1, tail=True)
        policy.touch(f"tail {i}")
        policy.remove(f"tail {i}")
    policy.insert("body", 0)
    policy.insert("tail", 1, tail=True)
    assert list(policy.candidates()) == ["body", "tail"]


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match=r"no eviction policy 'belady', there are: fifo, len.*lru"):
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
            policy.insert(key, key, tail=key % 2 == 0)
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
