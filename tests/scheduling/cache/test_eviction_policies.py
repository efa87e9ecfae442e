import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES, open_eviction_policy
from halfmoon_scheduling.cache.reuse_time_policy import GhostTable


def order(name: str, uses: str) -> str:
    """Insert a to d, then touch the letters of `uses`: the order of eviction."""
    policy = open_eviction_policy(name)
    for row, letter in enumerate("abcd"):
        policy.insert(row, key=ord(letter), depth=row)
    for letter in uses:
        policy.touch("abcd".index(letter))
    return "".join("abcd"[row] for row in policy.candidates())


@pytest.mark.parametrize(
    ("name", "uses", "evicted"),
    [
        ("fifo", "aab", "abcd"),  # in the order of storing, whatever is used
        ("lru", "aab", "cdab"),  # the one unused longest
        ("lfu", "aabdc", "bdca"),  # the one used least, and among equals as LRU
        ("length_aware", "dda", "cbad"),  # among those used equally often ends of prompts
        ("length_aware_later", "dda", "bcad"),  # and starts of prompts
        ("patience", "aabbccdd", "abcd"),  # among those used equally often as LRU
        ("patience", "aab", "cdab"),  # it begins as LRU
    ],
)
def test_each_policy_evicts_in_its_order(name: str, uses: str, evicted: str) -> None:
    assert order(name, uses) == evicted


class Crowd:
    """A patience policy, and blocks with names."""

    def __init__(self) -> None:
        self.policy = open_eviction_policy("patience")
        self.names: list[str] = []

    def insert(self, name: str, *, tail: bool = False) -> None:
        key = int.from_bytes(name.encode()[-8:], "little")
        self.policy.insert(len(self.names), key, tail=tail)
        self.names.append(name)

    def touch(self, name: str) -> None:
        self.policy.touch(self.row(name))

    def remove(self, name: str) -> None:
        row = self.row(name)
        self.policy.remove(row)
        self.names[row] = ""

    def row(self, name: str) -> int:
        return self.names.index(name)

    def order(self) -> list[str]:
        return [self.names[row] for row in self.policy.candidates()]


def a_crowd_that_came_and_went() -> Crowd:
    """Of those used once a quarter came back, of those used twice all."""
    crowd = Crowd()
    for i in range(400):
        crowd.insert(f"{i}")
        if i % 4 == 0:
            crowd.touch(f"{i}")
            crowd.touch(f"{i}")
        crowd.remove(f"{i}")
    return crowd


def test_patience_waits_as_much_longer_as_the_root_of_how_much_more_often_blocks_return() -> None:
    crowd = a_crowd_that_came_and_went()
    crowd.insert("friend")
    crowd.touch("friend")
    for i in range(100):
        crowd.insert(f"passer-by {i}")
    # Four times the share is worth twice the wait: the friend goes in the middle of the others.
    assert crowd.order().index("friend") == pytest.approx(50, abs=3)


def test_patience_learns_that_tails_of_prompts_are_not_used_again() -> None:
    crowd = Crowd()
    for i in range(50):
        crowd.insert(f"tail {i}", tail=True)
        crowd.insert(f"body {i}")
        crowd.touch(f"body {i}")
        crowd.remove(f"tail {i}")
        crowd.remove(f"body {i}")
    for i in range(3):
        crowd.insert(f"new {i}")
    crowd.insert("tail", tail=True)
    for i in range(3, 6):
        crowd.insert(f"new {i}")
    # Its share is a fiftieth of theirs: it has waited 3, they up to 6, and it goes first.
    assert crowd.order()[0] == "tail"


def test_patience_is_never_greater_for_tails_than_for_other_new_blocks() -> None:
    crowd = Crowd()
    for i in range(50):
        crowd.insert(f"tail {i}", tail=True)
        crowd.touch(f"tail {i}")
        crowd.remove(f"tail {i}")
    crowd.insert("tail", tail=True)
    for i in range(4):
        crowd.insert(f"body {i}")
    # All tails came back, of the others nothing is known: they go in the order of LRU.
    assert crowd.order() == ["tail", "body 0", "body 1", "body 2", "body 3"]


def test_patience_remembers_how_often_a_block_was_used_before_it_went() -> None:
    crowd = a_crowd_that_came_and_went()
    for name in ("friend", "stranger"):
        crowd.insert(name)
    crowd.remove("friend")
    crowd.insert("friend")
    for i in range(100):
        crowd.insert(f"passer-by {i}")
    assert crowd.order().index("stranger") == 0
    assert crowd.order().index("friend") > 30


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30, unique=True),
    n_blocks=st.integers(1, 5000),
)
def test_what_is_remembered_is_still_known_when_the_memory_has_grown(
    keys: list[int], n_blocks: int
) -> None:
    memory = GhostTable()
    for key in keys:
        memory.remember(key, 3)
    known = [key for key in keys if memory.recall(key) == 3]
    memory.grow(n_blocks)
    assert all(memory.recall(key) == 3 for key in known)
    assert known, "the last one is always known"


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"no eviction policy 'belady', there are: lru, lfu, fifo, len"
    ):
        open_eviction_policy("belady")


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@given(steps=st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove"]), st.integers(0, 5))))
def test_every_policy_proposes_exactly_what_is_stored(
    name: str, steps: list[tuple[str, int]]
) -> None:
    policy = open_eviction_policy(name)
    stored: set[int] = set()
    for step, key in steps:
        if step == "insert" and key not in stored:
            policy.insert(key, key, key, tail=key % 2 == 0)
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


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@given(uses=st.lists(st.lists(st.integers(0, 9), unique=True)))
def test_using_several_rows_at_once_is_using_one_after_the_other(
    name: str, uses: list[list[int]]
) -> None:
    at_once, each = open_eviction_policy(name), open_eviction_policy(name)
    for row in range(10):
        at_once.insert(row, row, row)
        each.insert(row, row, row)
    for rows in uses:
        at_once.touch_all(rows)
        for row in rows:
            each.touch(row)
        assert list(at_once.candidates()) == list(each.candidates())
