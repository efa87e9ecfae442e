"""A request that waits for decode pages is placed again by what changed, and by nothing else."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.requests.request_state import Phase
from tests.nightly import by_day
from tests.scheduling.core import D0, R1, Core, asked

N_WORKERS = 8


class Placements:
    """How often the placer was asked."""

    def __init__(self) -> None:
        self.n = 0


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> Iterator[Placements]:
    counted = Placements()
    place = Placer.place

    def counting(self: Placer, *args: object, **kwargs: object) -> object:
        counted.n += 1
        return place(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Placer, "place", counting)
    # The audit itself places: it is not to be counted.
    monkeypatch.setattr(Conductor, "check", lambda self: None)
    yield counted


def full() -> Core:
    """One request waits, and no decode worker has a page."""
    core = Core("prefill-0", *(f"decode-{i}" for i in range(N_WORKERS)))
    for i in range(N_WORKERS):
        core.load(f"decode-{i}", free_pages=0, n_running=3)
    assert core.arrive() == []
    assert core.phase() is Phase.WAITING
    return core


def test_a_request_is_placed_again_once_and_by_the_report_that_shows_room(
    placements: Placements,
) -> None:
    core = full()
    core.load("decode-0", free_pages=0, n_running=3)
    before = placements.n
    for i in range(N_WORKERS):
        core.load(f"decode-{i}", free_pages=0, n_running=3)
        core.load(f"decode-{i}", free_pages=0, n_running=4)
    core.load("decode-3", free_pages=1, n_running=2)  # more, and too few for this request
    core.tick()
    assert placements.n == before
    assert asked(core.load("decode-5", free_pages=10)) == {R1: "decode-5"}
    assert placements.n == before + 1


def test_room_at_a_worker_that_could_never_hold_it_places_nothing(placements: Placements) -> None:
    core = Core("prefill-0", "decode-0")
    core.join("decode-1", n_blocks=3)
    core.load("decode-0", free_pages=0)
    core.load("decode-1", free_pages=0)
    core.arrive(n_tokens=60)
    before = placements.n
    assert core.load("decode-1", free_pages=3) == []
    assert placements.n == before
    assert asked(core.load("decode-0", free_pages=20)) == {R1: D0}


def test_a_worker_that_refused_is_asked_again_by_more_room_or_when_its_time_is_over() -> None:
    for by_report in (True, False):
        core = Core("prefill-0", "decode-0")
        core.load(free_pages=40, n_running=60)
        core.arrive()
        assert core.refused(retry_after_s=2.0) == []
        if by_report:
            assert core.load(free_pages=40, n_running=60) == []
            assert core.load(free_pages=30, n_running=64) == []
            again = core.load(free_pages=30, n_running=63)
        else:
            assert core.tick(1.9) == []
            again = core.tick(2.0)
        assert asked(again) == {R1: D0}


@pytest.mark.parametrize("seed", range(by_day(8, at_night=40)))
def test_whatever_happens_no_request_waits_that_would_fit(seed: int) -> None:
    """Every event is followed by `Conductor.check`, which tries everything again."""
    dice = random.Random(seed)
    print(f"seed {seed}")
    core = Core("prefill-0")
    n_pages = {f"decode-{i}": dice.choice((4, 8, 16)) for i in range(4)}
    for worker, pages in n_pages.items():
        core.join(worker, n_blocks=pages)
    n_clients = n_waited = 0
    stopping: list[RequestId] = []

    def of(phase: Phase) -> list[RequestId]:
        known = (RequestId(f"cmpl-{i}") for i in range(n_clients))
        return [rid for rid in known if core.conductor.phase_of(rid) is phase]

    def decode_of(rid: RequestId) -> WorkerId:
        return next(
            d.placement.decode or WorkerId("")
            for d in reversed(core.conductor.decisions)
            if d.request_id == rid
        )

    for _ in range(400):
        core.now += dice.choice((0.0, 0.01, 0.5))
        worker = dice.choice(sorted(n_pages))
        reserving, prefilling = of(Phase.RESERVING), of(Phase.PREFILLING)
        match dice.randrange(12):
            case 0 | 1 | 2:
                size: Any = {"n_tokens": dice.choice((1, 30, 60, 200))}
                core.arrive(f"cmpl-{n_clients}", priority=dice.choice((0, 0, 1)), **size)
                n_clients += 1
            case 3:
                free_pages = dice.randrange(n_pages[worker] + 1)
                core.load(worker, free_pages, n_running=dice.randrange(4))
            case 4 if reserving:
                rid = dice.choice(reserving)
                core.reserved(decode_of(rid), rid)
            case 5 if reserving:
                rid, wait_s = dice.choice(reserving), dice.choice((0.0, 0.3, 1.0))
                core.refused(decode_of(rid), rid, dice.random() < 0.9, retry_after_s=wait_s)
            case 6 if prefilling:
                end = core.prefilled if dice.random() < 0.8 else core.prefill_failed
                end(rid=dice.choice(prefilling))
            case 7 if decoding := of(Phase.DECODING):
                rid = dice.choice(decoding)
                if dice.random() < 0.7:
                    core.finish(rid, 2)
                else:
                    core.decode_failed(decode_of(rid), rid)
            case 8:
                draining = dice.random() < 0.3
                if dice.random() < 0.2 and WorkerId(worker) in core.conductor.cluster:
                    core.lose(worker)
                else:
                    core.join(worker, n_blocks=n_pages[worker], draining=draining)
            case 9 if known := [rid for phase in Phase for rid in of(phase)]:
                rid = dice.choice(known)
                stopping += [rid] if rid in prefilling else []
                core.cancel(rid)
            case 10 if stopping:
                core.prefill_stopped(rid=stopping.pop())
            case _:
                core.tick()
        n_waited += len(of(Phase.WAITING)) > 0
    assert n_waited > 20, "next to nothing waited: the test shows nothing"
