"""Of decode workers that are equal otherwise, the one that may have a prompt's pages is chosen."""

from typing import Any

import pytest

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.placement import page_holders
from halfmoon_scheduling.placement.page_holders import PageHolders
from tests.scheduling.core import D0, D1, Core, asked

KEEPS: dict[str, Any] = {"keeps_pages": True, "skips_held_blocks": True}


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(text[: i + 1].encode()) for i in range(len(text))]


def test_the_longest_known_beginning_counts() -> None:
    holders = PageHolders()
    holders.put(hashes("ab"), D0, 1)
    holders.put(hashes("abcd"), D1, 2)
    assert holders.find(hashes("abcdef")) == (D1, 2)
    assert holders.find(hashes("abc")) == (D0, 1)
    assert holders.find(hashes("a")) is None
    assert holders.find([]) is None
    holders.put(hashes("ab"), D1, 1)  # the newest worker of a prompt counts
    holders.put([], D0, 1)
    assert holders.find(hashes("ab")) == (D1, 1)


def test_the_oldest_prompts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_holders, "MAX_PROMPTS", 2)
    holders = PageHolders()
    for text in ("a", "b", "a", "c"):
        holders.put(hashes(text), D0, 1)
    assert holders.find(hashes("b")) is None
    assert holders.find(hashes("a")) == holders.find(hashes("c")) == (D0, 1)


class Talk(Core):
    """A conversation with a cluster of two decode workers."""

    def __init__(self, **decode: Any) -> None:
        super().__init__()
        self.decode = decode
        self.n = 0
        cost = PrefillCost(1.0, 1e-2) if "local_prefill_tokens" in decode else None
        self.join("prefill-0", skips_held_blocks=True, prefill_cost=cost)
        for worker in (D0, D1):
            self.join(worker, **decode)

    def turn(self, n_tokens: int = 200) -> WorkerId:
        """Where the next turn is decoded."""
        self.n += 1
        (worker,) = asked(self.arrive(f"cmpl-{self.n}", n_tokens=n_tokens)).values()
        return worker


def a_talk(**decode: Any) -> Talk:
    """Its first turn was decoded at decode-1, since decode-0 had no room."""
    talk = Talk(**decode)
    talk.load("decode-0", free_pages=3)
    assert talk.turn(100) == D1
    talk.reserved("decode-1")
    talk.prefilled("decode-1" if "local_prefill_tokens" in decode else "prefill-0")
    talk.finish()
    talk.load("decode-0")
    return talk


@pytest.mark.parametrize("local", [{}, {"local_prefill_tokens": 4096}])
def test_the_next_turn_goes_where_the_one_before_it_was_decoded(local: dict[str, Any]) -> None:
    if local:
        local = local | {"prefill_cost": PrefillCost(1e-6, 1e-9)}
    talk = a_talk(**KEEPS, **local)
    talk.load("decode-1", free_pages=50)
    assert talk.turn() == D1


@pytest.mark.parametrize("but", ["keeps no pages", "is busier", "has no room"])
def test_it_goes_elsewhere_if_that_worker(but: str) -> None:
    talk = a_talk() if but == "keeps no pages" else a_talk(**KEEPS)
    if but == "is busier":
        talk.load("decode-1", n_running=1)
    elif but == "has no room":
        talk.load("decode-1", free_pages=3)
    assert talk.turn() == D0


def test_a_worker_that_was_restarted_has_no_pages() -> None:
    talk = a_talk(**KEEPS)
    talk.lose("decode-1")
    assert talk.turn(150) == D0
    talk.lose("decode-0")
    for worker in (D1, D0):
        talk.join(worker, generation=2, **KEEPS)
    assert talk.turn() == D0
