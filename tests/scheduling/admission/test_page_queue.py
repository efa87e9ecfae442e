"""A request that waits for decode pages is placed again by what changed, and by nothing else."""

import random
from collections.abc import Iterator

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    PrefillFailed,
    ReserveDecode,
)
from halfmoon_scheduling.commands import AnyCommand, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

N_WORKERS = 8


class Core:
    """A conductor that audits itself after every event: no request waits that would fit."""

    def __init__(self, **config: str) -> None:
        self.conductor = Conductor(SchedulingConfig(**config))  # type: ignore[arg-type]
        self.now = 0.0
        self.handle(WorkerJoined(a_worker("prefill-0")))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    def join(self, worker: str, **fields: bool | int) -> list[AnyCommand]:
        return self.handle(WorkerJoined(a_worker(worker, **fields)))  # type: ignore[arg-type]

    def arrive(self, rid: str, n_tokens: int = 40, priority: int = 0) -> list[AnyCommand]:
        return self.handle(RequestArrived(a_request(rid, n_tokens=n_tokens, priority=priority)))

    def load(self, worker: str, free_pages: int, n_running: int = 0) -> list[AnyCommand]:
        load = DecodeLoad(
            n_running=n_running,
            n_reserved=0,
            context_tokens=0,
            free_pages=free_pages,
            n_pages=64,
            step_s=0.0,
        )
        return self.handle(MessageReceived(WorkerId(worker), load))

    def phase(self, rid: str) -> Phase | None:
        return self.conductor.phase_of(RequestId(rid))


def asked(commands: list[AnyCommand]) -> list[WorkerId]:
    return [
        c.worker_id
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, ReserveDecode)
    ]


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


def full(**config: str) -> Core:
    """One request waits, and no decode worker has a page."""
    core = Core(**config)
    for i in range(N_WORKERS):
        core.join(f"decode-{i}")
        core.load(f"decode-{i}", free_pages=0, n_running=3)
    assert core.arrive("cmpl-1") == []
    assert core.phase("cmpl-1") is Phase.WAITING
    return core


def test_a_report_of_no_more_room_places_nothing_again(placements: Placements) -> None:
    core = full()
    core.load("decode-0", free_pages=0, n_running=3)
    before = placements.n
    for i in range(N_WORKERS):
        core.load(f"decode-{i}", free_pages=0, n_running=3)
        core.load(f"decode-{i}", free_pages=0, n_running=4)
    core.load("decode-3", free_pages=1, n_running=2)  # more, and too few for this request
    core.handle(Tick())
    assert placements.n == before


def test_the_report_that_shows_room_places_it_once(placements: Placements) -> None:
    core = full()
    before = placements.n
    assert asked(core.load("decode-5", free_pages=10)) == ["decode-5"]
    assert placements.n == before + 1


def test_room_at_a_worker_that_could_never_hold_it_places_nothing(placements: Placements) -> None:
    core = Core()
    core.join("decode-0", n_blocks=64)
    core.join("decode-1", n_blocks=3)
    core.load("decode-0", free_pages=0)
    core.load("decode-1", free_pages=0)
    core.arrive("cmpl-1", n_tokens=60)
    before = placements.n
    assert core.load("decode-1", free_pages=3) == []
    assert placements.n == before
    assert asked(core.load("decode-0", free_pages=20)) == ["decode-0"]


def test_a_worker_that_joins_or_drains_no_more_takes_what_waits() -> None:
    core = full()
    assert asked(core.join("decode-9")) == ["decode-9"]
    core = full()
    core.join("decode-7", draining=True)
    assert core.load("decode-7", free_pages=64) == []
    assert asked(core.join("decode-7")) == ["decode-7"]


def test_what_another_request_gives_back_takes_what_waits() -> None:
    core = Core()
    core.join("decode-0", n_blocks=4)
    core.arrive("cmpl-0")
    assert core.arrive("cmpl-1") == []
    assert asked(core.handle(RequestCancelled(RequestId("cmpl-0")))) == ["decode-0"]


def test_a_reservation_refused_for_ever_makes_room_for_what_waits() -> None:
    core = Core()
    core.join("decode-0", n_blocks=4)
    core.arrive("cmpl-0")
    core.arrive("cmpl-1")
    refused = DecodeRefused(request_id=RequestId("cmpl-0"), reason="too long", retryable=False)
    assert asked(core.handle(MessageReceived(WorkerId("decode-0"), refused))) == ["decode-0"]


def test_a_request_that_comes_to_be_the_first_is_placed_by_its_own_need() -> None:
    core = full()
    core.arrive("cmpl-2", n_tokens=1, priority=-1)
    assert core.load("decode-0", free_pages=2) == []
    assert asked(core.handle(RequestCancelled(RequestId("cmpl-1")))) == ["decode-0"]
    assert core.phase("cmpl-2") is Phase.RESERVING


def test_pages_that_turn_out_to_be_free_count_though_the_report_says_the_same() -> None:
    core = Core()
    core.join("decode-0", n_blocks=12)
    core.load("decode-0", free_pages=8)
    core.arrive("cmpl-0")  # 4 of the 8, by our books
    core.arrive("cmpl-1", n_tokens=100)
    assert core.phase("cmpl-1") is Phase.WAITING
    granted = DecodeReserved(
        request_id=RequestId("cmpl-0"), landing=a_landing("decode-0"), expires_s=60.0
    )
    core.handle(MessageReceived(WorkerId("decode-0"), granted))
    assert asked(core.load("decode-0", free_pages=8)) == ["decode-0"]


# -- workers that refused ------------------------------------------------------------------------


def refused_by_all(retry_after_s: float = 1.0) -> Core:
    """The request was refused by the only decode worker, which has told of free pages before."""
    core = Core()
    core.join("decode-0")
    core.load("decode-0", free_pages=40, n_running=60)
    assert asked(core.arrive("cmpl-1")) == ["decode-0"]
    refused = DecodeRefused(
        request_id=RequestId("cmpl-1"),
        reason="64 requests are running",
        retryable=True,
        retry_after_s=retry_after_s,
    )
    assert core.handle(MessageReceived(WorkerId("decode-0"), refused)) == []
    return core


def test_a_worker_that_refused_is_not_asked_again_by_a_report_of_no_more_room() -> None:
    core = refused_by_all()
    assert core.load("decode-0", free_pages=40, n_running=60) == []
    assert core.load("decode-0", free_pages=30, n_running=64) == []
    assert asked(core.load("decode-0", free_pages=30, n_running=63)) == ["decode-0"]


def test_a_worker_that_refused_is_asked_again_when_its_time_is_over() -> None:
    core = refused_by_all(retry_after_s=2.0)
    core.now = 1.9
    assert core.handle(Tick()) == []
    core.now = 2.0
    assert asked(core.handle(Tick())) == ["decode-0"]


# -- everything else -----------------------------------------------------------------------------


def test_a_first_token_that_is_late_by_now_is_refused_by_the_clock() -> None:
    core = Core(admission="early")
    core.join("decode-0")
    core.load("decode-0", free_pages=0)
    core.handle(RequestArrived(a_request("cmpl-1", ttft_slo_s=5.0)))
    assert core.phase("cmpl-1") is Phase.WAITING
    core.now = 5.1
    core.handle(Tick())
    assert core.phase("cmpl-1") is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_request_waits_that_would_fit(seed: int) -> None:
    """Every event is followed by `Conductor.check`, which tries everything again."""
    dice = random.Random(seed)
    print(f"seed {seed}")
    core = Core()
    n_pages = {f"decode-{i}": dice.choice((4, 8, 16)) for i in range(4)}
    for worker, pages in n_pages.items():
        core.join(worker, n_blocks=pages)
    n_clients = n_waited = 0

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
        worker = WorkerId(dice.choice(sorted(n_pages)))
        reserving, prefilling = of(Phase.RESERVING), of(Phase.PREFILLING)
        match dice.randrange(9):
            case 0 | 1:
                rid = RequestId(f"cmpl-{n_clients}")
                n_clients += 1
                core.arrive(rid, dice.choice((1, 30, 60, 200)), dice.choice((0, 0, 1)))
            case 2:
                core.load(worker, dice.randrange(n_pages[worker] + 1), dice.randrange(4))
            case 3 if reserving:
                rid = dice.choice(reserving)
                granted = DecodeReserved(
                    request_id=rid, landing=a_landing("decode-0"), expires_s=60.0
                )
                core.handle(MessageReceived(decode_of(rid), granted))
            case 4 if reserving:
                rid = dice.choice(reserving)
                refused = DecodeRefused(
                    request_id=rid,
                    reason="full",
                    retryable=dice.random() < 0.9,
                    retry_after_s=dice.choice((0.0, 0.3, 1.0)),
                )
                core.handle(MessageReceived(decode_of(rid), refused))
            case 5 if prefilling:
                done = a_prefill_done(dice.choice(prefilling))
                failed = PrefillFailed(request_id=done.request_id, reason="no", retryable=True)
                message = done if dice.random() < 0.8 else failed
                core.handle(MessageReceived(WorkerId("prefill-0"), message))
            case 6 if decoding := of(Phase.DECODING):
                rid = dice.choice(decoding)
                gone = DecodeFailed(request_id=rid, reason="preempted", retryable=True)
                ended = RequestFinished(rid, 2)
                core.handle(ended if dice.random() < 0.7 else MessageReceived(decode_of(rid), gone))
            case 7:
                draining = dice.random() < 0.3
                lost = dice.random() < 0.2 and worker in core.conductor.cluster
                core.handle(
                    WorkerLost(worker, "gone")
                    if lost
                    else WorkerJoined(a_worker(worker, n_blocks=n_pages[worker], draining=draining))
                )
            case _:
                core.handle(Tick())
        n_waited += len(of(Phase.WAITING)) > 0
    assert n_waited > 20, "next to nothing waited: the test shows nothing"


def test_a_try_that_is_placed_again_waits_like_any_other() -> None:
    core = full()
    core.handle(RequestCancelled(RequestId("cmpl-1")))
    assert asked(core.load("decode-0", free_pages=10)) == []
    core.arrive("cmpl-2")
    (resubmit,) = (
        c for c in core.handle(WorkerLost(WorkerId("decode-0"), "died")) if isinstance(c, Resubmit)
    )
    assert resubmit.request_id == "cmpl-2"
    assert core.handle(RequestArrived(a_request("cmpl-2~2", attempt=2))) == []
    assert asked(core.load("decode-1", free_pages=10)) == ["decode-1"]
