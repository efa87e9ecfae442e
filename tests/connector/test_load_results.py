"""How vLLM's thread learns that a load is over."""

import threading

from halfmoon_vllm.load_results import LoadResults

LONG_S = 60.0


def test_ends_are_taken_once_with_the_blocks_that_did_not_come() -> None:
    loads = LoadResults()
    loads.begin()
    loads.begin()
    assert loads.take() == (set(), set())
    loads.finish("a", [])
    loads.finish("b", [7, 8])
    assert loads.take(LONG_S) == ({"a", "b"}, {7, 8})
    assert loads.take(LONG_S) == (set(), set()), "nothing is under way: it does not wait"


def test_a_step_without_work_sleeps_until_a_load_is_over() -> None:
    loads = LoadResults()
    loads.begin()
    taken: list[set[str]] = []
    waiting = threading.Thread(target=lambda: taken.append(loads.take(LONG_S)[0]))
    waiting.start()
    loads.finish("a", [])
    waiting.join(LONG_S)
    assert taken == [{"a"}]


def test_it_waits_no_longer_than_it_may() -> None:
    loads = LoadResults()
    loads.begin()
    assert loads.take(0.001) == (set(), set())
