"""Of decode workers that are equal otherwise, the one that may have a prompt's pages is chosen."""

from typing import Any

import pytest

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import DecodeLoad, DecodeReserved, PrefillCost, ReserveDecode
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    MessageReceived,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.placement import page_holders
from halfmoon_scheduling.placement.page_holders import PageHolders
from halfmoon_testing.scheduling_inputs import (
    a_landing,
    a_prefill_done,
    a_request,
    a_worker,
)

D0, D1 = WorkerId("decode-0"), WorkerId("decode-1")
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


def test_the_newest_worker_of_a_prompt_counts() -> None:
    holders = PageHolders()
    holders.put(hashes("ab"), D0, 1)
    holders.put(hashes("ab"), D1, 1)
    holders.put([], D0, 1)
    assert holders.find(hashes("ab")) == (D1, 1)


def test_the_oldest_prompts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_holders, "MAX_PROMPTS", 2)
    holders = PageHolders()
    for text in ("a", "b", "a", "c"):
        holders.put(hashes(text), D0, 1)
    assert holders.find(hashes("b")) is None
    assert holders.find(hashes("a")) == holders.find(hashes("c")) == (D0, 1)


class Talk:
    """A conversation with a cluster of two decode workers."""

    def __init__(self, **decode: Any) -> None:
        self.conductor = Conductor(SchedulingConfig())
        self.decode = decode
        self.n = 0
        cost = PrefillCost(1.0, 1e-2) if "local_prefill_tokens" in decode else None
        info = a_worker("prefill-0", skips_held_blocks=True, prefill_cost=cost)
        self.conductor.handle(WorkerJoined(info), 0.0)
        for worker in (D0, D1):
            self.join(worker)

    def join(self, worker: str, generation: int = 1) -> None:
        info = a_worker(worker, generation=generation, **self.decode)
        self.conductor.handle(WorkerJoined(info), 0.0)

    def arrive(self, n_tokens: int) -> WorkerId:
        """Where the next turn is decoded."""
        self.n += 1
        request = a_request(f"cmpl-{self.n}", n_tokens=n_tokens)
        return self.reserving(self.conductor.handle(RequestArrived(request), 0.0))

    def reserving(self, commands: list[AnyCommand]) -> WorkerId:
        (worker,) = [
            c.worker_id
            for c in commands
            if isinstance(c, Send) and isinstance(c.message, ReserveDecode)
        ]
        return worker

    def hear(self, worker: str, message: Any) -> list[AnyCommand]:
        return self.conductor.handle(MessageReceived(WorkerId(worker), message), 0.0)

    def decode_it(self, worker: WorkerId) -> None:
        rid = RequestId(f"cmpl-{self.n}")
        landing = a_landing(worker)
        self.hear(worker, DecodeReserved(request_id=rid, landing=landing, expires_s=60.0))
        local = "local_prefill_tokens" in self.decode
        self.hear(worker if local else "prefill-0", a_prefill_done(rid))

    def finish(self) -> None:
        self.conductor.handle(RequestFinished(RequestId(f"cmpl-{self.n}"), n_new=8), 0.0)
        self.conductor.check()

    def turn_at_the_second(self) -> None:
        """Have the first turn decoded at decode-1, since decode-0 has no room."""
        self.load(D0, free_pages=3)
        assert self.arrive(100) == D1
        self.decode_it(D1)
        self.finish()
        self.load(D0)

    def load(self, worker: WorkerId, *, free_pages: int = 64, n_running: int = 0) -> None:
        report = DecodeLoad(
            n_running=n_running,
            n_reserved=0,
            context_tokens=0,
            free_pages=free_pages,
            n_pages=64,
            step_s=0.0,
        )
        self.hear(worker, report)


@pytest.mark.parametrize("local", [{}, {"local_prefill_tokens": 4096}])
def test_the_next_turn_goes_where_the_one_before_it_was_decoded(local: dict[str, Any]) -> None:
    if local:
        local = local | {"prefill_cost": PrefillCost(1e-6, 1e-9)}
    talk = Talk(**KEEPS, **local)
    talk.turn_at_the_second()
    talk.load(D1, free_pages=50)
    assert talk.arrive(200) == D1


def test_workers_that_keep_no_pages_are_chosen_as_before() -> None:
    talk = Talk()
    talk.turn_at_the_second()
    assert talk.arrive(200) == D0


def test_a_busier_worker_is_not_chosen_for_its_pages() -> None:
    talk = Talk(**KEEPS)
    talk.turn_at_the_second()
    talk.load(D1, n_running=1)
    assert talk.arrive(200) == D0


def test_a_worker_without_room_is_not_chosen_for_its_pages() -> None:
    talk = Talk(**KEEPS)
    talk.turn_at_the_second()
    talk.load(D1, free_pages=3)
    assert talk.arrive(200) == D0


def test_a_worker_that_was_restarted_has_no_pages() -> None:
    talk = Talk(**KEEPS)
    talk.turn_at_the_second()
    talk.conductor.handle(WorkerLost(D1, "socket closed"), 0.0)
    assert talk.arrive(150) == D0
    talk.conductor.handle(WorkerLost(D0, "socket closed"), 0.0)
    talk.join(D1, generation=2)
    talk.join(D0, generation=2)
    assert talk.arrive(200) == D0
