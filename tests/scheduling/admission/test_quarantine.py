"""A request that takes workers down is stopped after two and one alone; no other one is."""

import random
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import RequestId, WorkerId, original_request_id, retry_id
from halfmoon_protocol.messages import (
    ReserveDecode,
    StartDecode,
    StartPrefill,
)
from halfmoon_scheduling.admission.loss_history import EVENT_S, MAX_EXCUSES
from halfmoon_scheduling.commands import AnyCommand, Deliver, Fail, Reject, Resubmit, Send
from halfmoon_scheduling.events import (
    AnyEvent,
    Casualty,
    Request,
    RequestProgressed,
    with_casualty,
)
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_request
from tests.nightly import by_day
from tests.scheduling.core import Core


class Cluster(Core):
    """A conductor, the gateway's part of retries, and workers that do as they are told.

    What a worker was told and has not done is in `told`; the test says what is done next.
    """

    def __init__(self, n_prefill: int, n_decode: int, **config: Any) -> None:
        self.requests: dict[str, Request] = {}
        #: By the client's request: how it ended.
        self.ended: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.casualties: dict[str, tuple[Casualty, ...]] = {}
        #: By worker, in the order in which they came.
        self.told: dict[WorkerId, list[StartPrefill | StartDecode]] = {}
        self.generations: Counter[str] = Counter()
        #: Starts of workers that computed a client's request.
        self.seen_by: defaultdict[str, list[tuple[WorkerId, int]]] = defaultdict(list)
        #: Tokens of the try under way.
        self.n_new: Counter[str] = Counter()
        prefills = (f"prefill-{i}" for i in range(n_prefill))
        super().__init__(*prefills, *(f"decode-{i}" for i in range(n_decode)), **config)

    # -- what happens ------------------------------------------------------------------------

    def join(self, worker: str, **fields: Any) -> list[AnyCommand]:
        if not fields.get("draining"):
            self.generations[worker] += 1
            self.told[WorkerId(worker)] = []
        return super().join(worker, generation=self.generations[worker], **fields)

    def come(self, *names: str) -> None:
        for name in names:
            self.requests[name] = a_request(name, n_tokens=20)
            self.arrive(self.requests[name])

    def lose(self, worker: str) -> list[AnyCommand]:
        self.told.pop(WorkerId(worker))
        return super().lose(worker)

    def prefill(self, name: str, request: str) -> None:
        """The worker is through with a request that it was told to prefill."""
        told = self.told[WorkerId(name)]
        start = next(
            s
            for s in told
            if isinstance(s, StartPrefill) and original_request_id(s.request_id) == request
        )
        told.remove(start)
        self.prefilled(name, start.request_id)

    def decode(self, name: str, request: str) -> None:
        """The worker makes a token of a request that it decodes."""
        assert WorkerId(name) in self.where(request, StartDecode)
        self._token(request)

    def where(
        self, request: str, kind: type[StartPrefill | StartDecode] = StartPrefill
    ) -> list[WorkerId]:
        """The live workers that compute a request."""
        return [
            worker
            for worker, told in self.told.items()
            for start in told
            if isinstance(start, kind) and original_request_id(start.request_id) == request
        ]

    def lose_prefill(self, request: str) -> WorkerId:
        """The first worker that prefills a request is lost."""
        worker = self.where(request)[0]
        self.lose(worker)
        return worker

    def phase(self, rid: str = "one") -> Phase | None:
        return super().phase(self.requests[rid].request_id)

    # -- inside ------------------------------------------------------------------------------

    def _token(self, request: str) -> None:
        self.n_new[request] += 1
        if self.n_new[request] == 2 and self.casualties.get(request):
            self.casualties[request] = ()
            self.handle(RequestProgressed(self.requests[request].request_id))

    def handle(self, event: AnyEvent, now: float | None = None) -> list[AnyCommand]:
        commands = super().handle(event, now)
        for command in commands:
            self._perform(command)
        return commands

    def _perform(self, command: AnyCommand) -> None:
        match command:
            case Send(worker_id=worker, message=ReserveDecode(request_id=rid)):
                self.reserved(worker, rid, expires_s=600.0)
            case Send(worker_id=worker, message=StartPrefill() | StartDecode() as start):
                self.told[worker].append(start)
                self.seen_by[original_request_id(start.request_id)].append(
                    (worker, self.generations[worker])
                )
            case Deliver(request_id=rid):
                self._token(original_request_id(rid))
            case Resubmit(request_id=rid):
                self._resubmit(original_request_id(rid), command.casualty, counts=command.counts)
            case Fail(request_id=rid) | Reject(request_id=rid):
                harmful = isinstance(command, Fail) and command.casualties
                self.ended[original_request_id(rid)] = "harmful" if harmful else "failed"
                self.reasons[original_request_id(rid)] = command.reason
            case _:
                pass

    def _resubmit(self, request: str, casualty: Casualty | None, *, counts: bool) -> None:
        known = self.casualties.get(request, ())
        if casualty is not None:
            known = self.casualties[request] = with_casualty(known, casualty)
        before = self.requests[request]
        fruitless = 0 if self.n_new[request] else before.fruitless + counts
        self.n_new[request] = 0
        self.requests[request] = msgspec.structs.replace(
            before,
            request_id=retry_id(RequestId(request), before.attempt + 1),
            attempt=before.attempt + 1,
            fruitless=fruitless,
            casualties=known,
        )
        self.arrive(self.requests[request])

    def settle(self) -> None:
        """Let losses that come now be another event than those before."""
        self.now += EVENT_S + 0.1
        self.tick()


# -- who takes workers down ----------------------------------------------------------------------


def test_a_request_that_takes_down_two_prefill_workers_is_tried_on_one_more_alone() -> None:
    them = Cluster(4, 1)
    them.come("bad")
    for n_lost in (1, 2, 3):
        them.lose_prefill("bad")
        assert them.phase("bad") is (Phase.PREFILLING if n_lost == 1 else Phase.QUARANTINED)
        them.settle()
    assert them.ended == {"bad": "harmful"}
    assert len(set(them.seen_by["bad"])) == 3
    assert all(worker in them.reasons["bad"] for worker, _ in them.seen_by["bad"])
    assert them.conductor.refusals == {"harmful": 1}


def test_a_request_that_takes_down_two_decode_workers_is_tried_on_one_more_alone() -> None:
    """Though each try brings the client a token, from prefill."""
    them = Cluster(1, 4)
    them.come("bad")
    for _ in range(3):
        them.prefill("prefill-0", "bad")
        (worker,) = them.where("bad", StartDecode)
        them.lose(worker)
        them.settle()
    assert them.ended == {"bad": "harmful"}
    assert len({w for w in them.seen_by["bad"] if w[0].startswith("decode")}) == 3


# -- workers that are lost together --------------------------------------------------------------


def test_a_rack_that_dies_is_not_charged_to_a_request_that_was_there() -> None:
    """Its decode worker, then a prefill worker that was not yet known to be dead, and a kvstore."""
    them = Cluster(2, 2)
    them.join("kvstore-0")
    them.come("one")
    them.prefill(them.where("one")[0], "one")
    them.lose(them.where("one", StartDecode)[0])
    them.now += 0.1
    them.lose_prefill("one")
    assert them.phase("one") is Phase.QUARANTINED, "other workers may be dead too"
    them.now += 0.1
    them.lose("kvstore-0")
    assert them.phase("one") is Phase.PREFILLING, "the kvstore had nothing of it"
    assert them.requests["one"].fruitless <= 1
    # It is no suspect: a further loss is its first.
    them.settle()
    them.lose_prefill("one")
    assert not them.ended


def test_losses_at_one_moment_are_waited_out_and_are_no_tries_without_a_token() -> None:
    them = Cluster(4, 1, max_attempts=2)
    them.come("one")
    for _ in range(2):
        them.lose_prefill("one")
    assert them.requests["one"].fruitless == 1
    assert them.phase("one") is Phase.QUARANTINED
    them.now += EVENT_S / 2
    them.tick()
    assert them.phase("one") is Phase.QUARANTINED
    them.settle()
    assert them.phase("one") is Phase.PREFILLING
    assert not them.ended


def test_a_request_is_excused_for_others_losses_a_few_times_only() -> None:
    them = Cluster(12, 1, max_attempts=100)
    them.come("bad")
    n_events = 0
    while not them.ended:
        worker = them.lose_prefill("bad")
        them.lose(next(w for w in them.told if w != worker and w.startswith("prefill")))
        them.settle()
        n_events += 1
        assert n_events < 10
    assert them.ended == {"bad": "harmful"}
    assert n_events == MAX_EXCUSES + 2


# -- tried alone ---------------------------------------------------------------------------------


def lost_twice(them: Cluster) -> None:
    them.come("bad")
    for _ in range(2):
        them.lose_prefill("bad")
        them.now += EVENT_S + 0.1


def test_a_request_that_is_tried_alone_waits_for_idle_workers_and_keeps_others_off() -> None:
    them = Cluster(4, 2)
    lost_twice(them)
    them.come("early")
    (busy,) = them.where("early")
    them.tick()
    (alone,) = them.where("bad")
    assert alone != busy
    at = them.conductor.holds_at(them.requests["bad"].request_id)
    for n in range(6):
        them.come(f"late-{n}")
        assert them.where(f"late-{n}") == [busy]
        assert them.conductor.holds_at(them.requests[f"late-{n}"].request_id) != at
    them.prefill(alone, "bad")
    them.come("later")
    assert them.where("later") == [alone], "it has done no harm there"
    them.decode(them.where("bad", StartDecode)[0], "bad")
    assert not them.conductor._table.quarantine.workers_kept_alone
    assert not them.ended


def test_others_wait_while_the_only_worker_is_kept_for_one() -> None:
    them = Cluster(3, 1)
    lost_twice(them)
    them.tick()
    assert len(them.where("bad")) == 1
    them.come("other")
    assert them.phase("other") is Phase.WAITING
    them.prefill(them.where("bad")[0], "bad")
    them.decode(them.where("bad", StartDecode)[0], "bad")
    assert them.phase("other") is Phase.PREFILLING


def test_a_link_that_goes_down_and_up_again_counts_once() -> None:
    them = Cluster(2, 1)
    them.come("one")
    first = them.lose_prefill("one")
    (second,) = them.where("one")
    them.generations[first] -= 1  # the same start is back
    them.join(first)
    them.join(second, draining=True)
    them.lose(second)
    assert them.where("one") == [first]
    them.lose(first)
    assert them.casualties["one"] == (Casualty(first, 1),)
    assert them.ended == {}


def test_a_prefill_worker_that_hangs_counts() -> None:
    them = Cluster(3, 1, request_timeout_s=100.0)
    them.come("bad")
    for i in range(3):
        assert len(them.where("bad")) == i + 1  # at each other one
        them.now += 100.0
        them.tick()
    assert them.ended == {"bad": "harmful"}


def test_a_prefill_worker_that_is_through_with_others_is_only_slow() -> None:
    them = Cluster(1, 1, request_timeout_s=100.0)
    them.come("first", "second")
    them.now = 60.0
    them.prefill("prefill-0", "first")
    them.now = 100.0
    them.tick()
    assert them.requests["second"].attempt == 2
    assert not them.casualties


# -- who does not --------------------------------------------------------------------------------


def test_what_only_had_pages_at_a_lost_worker_is_innocent() -> None:
    them = Cluster(1, 2)
    them.come("one")
    for _ in range(2):
        decode = them.conductor.decisions[-1].placement.decode
        assert decode is not None
        them.join(decode)
    assert not them.casualties
    assert them.phase("one") is Phase.PREFILLING


def test_a_worker_told_to_go_is_no_casualty() -> None:
    them = Cluster(1, 4)
    them.come("one")
    for _ in range(3):
        them.prefill("prefill-0", "one")
        (worker,) = them.where("one", StartDecode)
        them.join(worker, draining=True)
        them.lose(worker)
    assert not them.casualties
    assert not them.ended


def test_a_token_from_decode_in_between_clears_a_request() -> None:
    them = Cluster(1, 6)
    them.come("long")
    for _ in range(5):
        them.prefill("prefill-0", "long")
        (worker,) = them.where("long", StartDecode)
        them.decode(worker, "long")
        them.lose(worker)
    assert not them.ended
    assert len(them.casualties["long"]) == 1


# -- who dies beside it --------------------------------------------------------------------------


def run(them: Cluster, dice: random.Random, poisons: set[str], where: str) -> None:
    """Let workers work in any order; a poison takes down whatever computes it there.

    A lost worker comes back at once, as another start.
    """
    for _ in range(10_000):
        them.now += 0.3
        them.tick()
        workers = [w for w, told in them.told.items() if told]
        if not workers:
            if not any(them.conductor.n_requests.values()):
                return
            continue
        worker = dice.choice(workers)
        told = them.told[worker]
        role = worker.split("-")[0]
        # Prefill: one pass of some of the queue. Decode: a step of all.
        rows = told[: dice.randint(1, 3)] if role == "prefill" else list(told)
        names = [original_request_id(start.request_id) for start in rows]
        if role in where and poisons.intersection(names):
            them.join(worker)
            continue
        for name in names:
            if role == "prefill":
                them.prefill(worker, name)
                continue
            them.decode(worker, name)
            if them.n_new[name] == 4:
                start = next(s for s in told if original_request_id(s.request_id) == name)
                told.remove(start)
                them.ended[name] = "finished"
                them.finish(start.request_id, 4)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("where", ["prefill", "decode", "prefill or decode"])
@pytest.mark.parametrize("seed", range(by_day(4, at_night=10)))
def test_what_is_computed_beside_a_request_that_takes_workers_down_is_served(
    seed: int, where: str
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    them = Cluster(2, 2)
    names = [f"good-{i}" for i in range(12)]
    names.insert(dice.randrange(len(names)), "bad")
    them.come(*names)
    run(them, dice, {"bad"}, where)
    assert them.ended.pop("bad") == "harmful"
    assert set(them.ended.values()) == {"finished"}, them.reasons
    assert len(them.ended) == 12
    took = [w for w in them.seen_by["bad"] if w[0].split("-")[0] in where]
    assert len(set(took)) <= 3
    assert not any(them.conductor.n_requests.values())


def two_suspects(**config: Any) -> Cluster:
    """Two requests lost their decode workers one after the other: one of them is tried alone."""
    them = Cluster(1, 2, **config)
    them.come("a", "b")
    for name in "ab":
        them.prefill("prefill-0", name)
    first, second = (them.where(name, StartDecode)[0] for name in "ab")
    them.join(first)  # as another start: the earlier one is lost
    them.settle()
    them.join(second)
    return them


def test_a_suspect_waits_for_a_worker_that_tries_no_other_and_holds_up_no_one_else() -> None:
    them = two_suspects()
    one, other = sorted("ab", key=lambda name: them.phase(name) is Phase.QUARANTINED)
    assert (them.phase(one), them.phase(other)) == (Phase.PREFILLING, Phase.QUARANTINED)
    them.come("new")
    assert them.phase("new") is Phase.PREFILLING
    them.prefill("prefill-0", one)  # which frees the prefill worker for the other
    assert them.phase(other) is Phase.PREFILLING


def test_a_client_that_leaves_ends_a_trial() -> None:
    them = two_suspects()
    one, other = sorted("ab", key=lambda name: them.phase(name) is Phase.QUARANTINED)
    them.cancel(them.requests[one].request_id)
    assert them.phase(other) is Phase.PREFILLING


def test_a_suspect_that_no_worker_comes_free_for_ends_in_an_error() -> None:
    them = two_suspects(request_timeout_s=100.0)
    quarantined = next(n for n in "ab" if them.phase(n) is Phase.QUARANTINED)
    for seconds in (50.0, 50.0):
        them.now += seconds
        them.come(f"new-{them.now}")
        them.prefill("prefill-0", f"new-{them.now}")  # it does not hang
        them.tick()
    assert "none came free" in them.reasons[quarantined]
