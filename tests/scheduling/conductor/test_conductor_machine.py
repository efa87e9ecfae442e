from typing import Any, TypeVar

import msgspec
import pytest

from halfmoon_protocol.blocks import root_hash
from halfmoon_protocol.ids import RequestId, WorkerId, retry_id
from halfmoon_protocol.kv_events import BlockStored, KvEventBatch
from halfmoon_protocol.messages import (
    AnswerChain,
    BlocksSnapshot,
    CachedPrefix,
    Cancel,
    DecodeCost,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    KvstoreAddress,
    KvstoreLoad,
    PrefillCost,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ReserveDecode,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    ToConductor,
    ToWorker,
    Welcome,
)
from halfmoon_protocol.sampling import Finish, Sampling
from halfmoon_protocol.snapshots import PAGE
from halfmoon_scheduling.commands import (
    AnyCommand,
    Deliver,
    Fail,
    RefuseWorker,
    Reject,
    Resubmit,
    Send,
)
from halfmoon_scheduling.conductor import placer
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    Casualty,
    KvChanged,
    MessageReceived,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import LAYOUT, a_landing, a_request, a_worker

R1, R2 = RequestId("cmpl-1"), RequestId("cmpl-2")
P0, P1, D0, D1, K0, K1 = (
    WorkerId(name)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0", "kvstore-1")
)
T = TypeVar("T", bound=AnyCommand)


class Core:
    """A conductor whose books are audited after every event."""

    def __init__(self, *workers: str, **config: Any) -> None:
        self.conductor = Conductor(SchedulingConfig(**config))
        self.now = 0.0
        for worker in workers:
            self.join(worker)

    def handle(self, event: AnyEvent, now: float | None = None) -> list[AnyCommand]:
        self.now = self.now if now is None else now
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    def join(self, worker: str, **fields: Any) -> list[AnyCommand]:
        return self.handle(WorkerJoined(a_worker(worker, **fields)))

    def lose(self, worker: str) -> list[AnyCommand]:
        return self.handle(WorkerLost(WorkerId(worker), "socket closed"))

    def arrive(self, request: Request | str = "cmpl-1", **fields: Any) -> list[AnyCommand]:
        request = a_request(request, **fields) if isinstance(request, str) else request
        return self.handle(RequestArrived(request))

    def hear(self, worker: str, message: ToConductor) -> list[AnyCommand]:
        return self.handle(MessageReceived(WorkerId(worker), message))

    def reserved(self, worker: str = "decode-0", rid: str = "cmpl-1") -> list[AnyCommand]:
        message = DecodeReserved(
            request_id=RequestId(rid), landing=a_landing(worker), expires_s=60.0
        )
        return self.hear(worker, message)

    def prefilled(
        self, worker: str = "prefill-0", rid: str = "cmpl-1", finish: Finish = "", **fields: Any
    ) -> list[AnyCommand]:
        defaults = {"n_cached": 0, "queue_s": 0.0, "compute_s": 0.01, "drain_s": 0.0}
        message = PrefillDone(
            request_id=RequestId(rid), first_token=7, finish=finish, **(defaults | fields)
        )
        return self.hear(worker, message)

    def refused(
        self,
        worker: str = "decode-0",
        rid: str = "cmpl-1",
        retryable: bool = True,
        code: str = "",
    ) -> list[AnyCommand]:
        message = DecodeRefused(
            request_id=RequestId(rid),
            reason="0 of 64 pages are free",
            retryable=retryable,
            code=code,
        )
        return self.hear(worker, message)

    def load(self, worker: str = "decode-0", free_pages: int = 64) -> list[AnyCommand]:
        message = DecodeLoad(
            n_running=0, n_reserved=0, context_tokens=0, free_pages=free_pages, n_pages=64, step_s=0
        )
        return self.hear(worker, message)

    def hold(self, kvstore: str, request: Request, n_blocks: int) -> None:
        """The kvstore says that it holds the first blocks of this prompt."""
        hashes = request.block_hashes[:n_blocks]
        assert self.hear(kvstore, BlocksSnapshot(sequence=-1, hashes=hashes)) == []

    def phase(self, rid: str = "cmpl-1") -> Phase | None:
        return self.conductor.phase_of(RequestId(rid))

    @property
    def n_requests(self) -> dict[str, int]:
        counts = {phase: n for phase, n in self.conductor.n_requests.items() if n}
        assert self.conductor.is_idle == (not counts)
        return counts


def sent(commands: list[AnyCommand]) -> list[tuple[WorkerId, type[ToWorker]]]:
    return [(c.worker_id, type(c.message)) for c in commands if isinstance(c, Send)]


def only(commands: list[AnyCommand], kind: type[T]) -> T:
    (command,) = commands
    assert isinstance(command, kind), command
    return command


def message_to(commands: list[AnyCommand], worker: str) -> Any:
    (message,) = (c.message for c in commands if isinstance(c, Send) and c.worker_id == worker)
    return message


def start_prefill(core: Core, **fields: Any) -> StartPrefill:
    core.arrive(**fields)
    message = only(core.reserved(), Send).message
    assert isinstance(message, StartPrefill)
    return message


def decoding(core: Core, **fields: Any) -> None:
    start_prefill(core, **fields)
    core.prefilled()
    assert core.phase() is Phase.DECODING


# -- the way of a request ------------------------------------------------------------------------


def test_a_request_is_reserved_then_prefilled_then_decoded() -> None:
    core = Core("prefill-0", "decode-0")
    request = a_request()
    reserve = only(core.arrive(request), Send)
    assert reserve.worker_id == D0
    assert reserve.message == ReserveDecode(request_id=R1, n_tokens=40, stopping=request.stopping)
    assert core.phase() is Phase.RESERVING
    start = only(core.reserved(), Send)
    assert start.worker_id == P0
    assert start.message == StartPrefill(
        request_id=R1,
        token_ids=request.token_ids,
        n_prompt=40,
        block_hashes=request.block_hashes,
        landing=a_landing("decode-0"),
        landing_expires_s=55.0,
        sampling=request.sampling,
        stopping=request.stopping,
    )
    assert core.phase() is Phase.PREFILLING
    delivered, decode = core.prefilled(n_cached=16)
    assert delivered == Deliver(R1, 7, "", 16)
    assert decode == Send(
        D0,
        StartDecode(
            request_id=R1,
            first_token=7,
            sampling=request.sampling,
            stopping=request.stopping,
            n_prompt=40,
        ),
    )
    assert core.handle(RequestFinished(R1)) == []
    assert core.n_requests == {}


def test_a_request_that_ends_with_its_first_token_needs_no_decode() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    delivered, cancel = core.prefilled(finish="stop")
    assert delivered == Deliver(R1, 7, "stop", 0)
    assert cancel == Send(D0, Cancel(request_id=R1))
    assert core.n_requests == {}


def test_decode_gets_the_history_only_if_sampling_looks_at_it() -> None:
    core = Core("prefill-0", "decode-0")
    request = a_request(sampling=Sampling(repetition_penalty=1.1))
    core.arrive(request)
    core.reserved()
    assert message_to(core.prefilled(), D0).history == request.token_ids


def test_a_landing_shorter_than_the_margin_leaves_half_of_itself_for_writing() -> None:
    core = Core("prefill-0", "decode-0", landing_margin_s=5.0)
    core.arrive()
    message = DecodeReserved(request_id=R1, landing=a_landing("decode-0"), expires_s=6.0)
    assert message_to(core.hear("decode-0", message), P0).landing_expires_s == 3.0


def test_a_late_grant_leaves_less_time_for_writing() -> None:
    core = Core("prefill-0", "decode-0", landing_margin_s=5.0)
    core.arrive()
    core.now = 4.0
    assert message_to(core.reserved(), P0).landing_expires_s == 51.0
    core.arrive("cmpl-2")
    core.now = 100.0
    assert message_to(core.reserved(rid="cmpl-2"), P0).landing_expires_s == 0.0


@pytest.mark.parametrize(("own_s", "left_s"), [(None, 6.0), (10.0, 8.0), (1.0, 0.0)])
def test_prefill_is_told_in_how_many_seconds_the_first_token_is_due(
    own_s: float | None, left_s: float
) -> None:
    core = Core("prefill-0", "decode-0", ttft_slo_s=8.0)
    core.arrive(ttft_slo_s=own_s)
    core.now = 2.0
    assert message_to(core.reserved(), P0).deadline_s == left_s


def test_a_request_whose_answer_has_begun_is_due_at_once() -> None:
    core = Core("prefill-0", "decode-0")
    request = msgspec.structs.replace(a_request(retry_id(R1, 2), n_tokens=40), n_prompt=30)
    core.arrive(request)
    assert message_to(core.reserved(rid=request.request_id), P0).deadline_s == 0.0


def test_prefill_is_told_where_the_cached_prefix_is_and_where_to_store() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0", "kvstore-1")
    core.join("prefill-0", home_kvstore="kvstore-0")
    core.hold("kvstore-1", a_request(n_tokens=100), 5)
    start = start_prefill(core, n_tokens=100)
    there = KvstoreAddress(K1, 1, "memory://kvstore-1/commands")
    assert start.cached == CachedPrefix(there, 5)
    assert start.store_in == KvstoreAddress(K0, 1, "memory://kvstore-0/commands")


def test_prefill_is_told_of_further_kvstores_that_hold_as_much_nearest_first() -> None:
    core = Core("decode-0", *(f"kvstore-{i}" for i in range(5)))
    core.join("prefill-0", host="near", home_kvstore="kvstore-4")
    core.join("kvstore-3", host="near")
    request = a_request(n_tokens=100)
    for name, n_blocks in (("kvstore-0", 5), ("kvstore-1", 4), ("kvstore-2", 5), ("kvstore-3", 5)):
        core.hold(name, request, n_blocks)
    cached = start_prefill(core, n_tokens=100).cached
    assert cached is not None and cached.n_blocks == 5
    assert cached.kvstore.worker_id == "kvstore-3"
    assert [replica.worker_id for replica in cached.replicas] == ["kvstore-0", "kvstore-2"]


def test_a_kvstore_that_failed_a_request_is_not_named_to_its_next_try() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0", "kvstore-1", "kvstore-2")
    core.join("prefill-0", home_kvstore="kvstore-2")
    request = a_request(n_tokens=100)
    for name in ("kvstore-0", "kvstore-1"):
        core.hold(name, request, 5)
    first = start_prefill(core, n_tokens=100).cached
    assert first is not None
    [second] = first.replicas
    failed = PrefillFailed(
        request_id=R1, reason="damaged", retryable=True, culprit=first.kvstore.worker_id
    )
    core.hear("prefill-0", failed)
    core.hold(first.kvstore.worker_id, request, 5)  # it still says so
    core.arrive(retry_id(R1, 2), n_tokens=100, attempt=2)
    again = message_to(core.reserved(rid=retry_id(R1, 2)), P0).cached
    assert again == CachedPrefix(second, 5)


def test_a_source_that_is_lost_before_prefill_starts_is_not_named() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0", "kvstore-1")
    core.hold("kvstore-1", a_request(n_tokens=100), 5)
    core.arrive(n_tokens=100)
    core.lose("kvstore-1")
    assert message_to(core.reserved(), P0).cached is None


def test_every_placement_is_kept_with_its_table() -> None:
    core = Core("prefill-0", "prefill-1", "decode-0", kept_decisions=1)
    core.arrive()
    core.arrive("cmpl-2")
    (decision,) = core.conductor.decisions
    assert decision.request_id == R2
    assert [row.worker_id for row in decision.placement.estimates] == [P0, P1]


def test_requests_spread_over_prefill_workers_as_queues_grow() -> None:
    core = Core("prefill-0", "prefill-1", "decode-0")
    core.arrive("cmpl-1")
    core.arrive("cmpl-2", prompt=1)
    assert [d.placement.prefill for d in core.conductor.decisions] == [P0, P1]


def test_a_queue_shrinks_by_what_has_run() -> None:
    core = Core("decode-0", admission="none")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    core.arrive("cmpl-1")
    core.now = 4.0
    core.arrive("cmpl-2")
    assert core.conductor.decisions[-1].placement.chosen.queue_s == pytest.approx(6)
    core.reserved()
    core.now = 30.0
    core.prefilled()
    core.arrive("cmpl-3")
    assert core.conductor.decisions[-1].placement.chosen.queue_s == pytest.approx(10)


def test_what_other_conductors_queued_counts() -> None:
    core = Core("decode-0")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=0.0, c1_s=0.5))
    load = PrefillLoad(n_queued=1, queued_tokens=20, free_pages=9, n_pages=9)
    core.hear("prefill-0", load)
    core.arrive()
    assert core.conductor.decisions[-1].placement.chosen.queue_s == pytest.approx(10)


def test_a_decode_worker_that_reports_slow_steps_is_avoided() -> None:
    core = Core("prefill-0")
    cost = DecodeCost(d0_s=0.01, d1_s=0.0, d2_s=0.0)
    core.join("decode-0", decode_cost=cost)
    core.join("decode-1", decode_cost=cost)
    for name, step_s in (("decode-0", 0.05), ("decode-1", 0.01)):
        as_busy = DecodeLoad(
            n_running=1, n_reserved=0, context_tokens=9, free_pages=60, n_pages=64, step_s=step_s
        )
        core.hear(name, as_busy)
    assert sent(core.arrive()) == [(D1, ReserveDecode)]


# -- learning ------------------------------------------------------------------------------------


def test_a_worker_that_prefills_slower_than_its_profile_says_is_expected_to() -> None:
    core = Core("decode-0")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    start_prefill(core)
    core.now = 20.0
    core.prefilled(compute_s=20.0)
    core.arrive("cmpl-2")
    # A tenth of what was seen, and nine tenths of what was thought.
    assert core.conductor.decisions[-1].placement.ttft_s == pytest.approx(11.0)


def test_waits_for_cached_blocks_are_not_taken_for_slow_computing() -> None:
    core = Core("decode-0")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    start_prefill(core)
    core.now = 20.0
    core.prefilled(compute_s=20.0, fetch_s=10.0)
    core.arrive("cmpl-2")
    assert core.conductor.decisions[-1].placement.ttft_s == 10.0


@pytest.mark.parametrize("n_readers", [1, 2])
def test_a_read_tells_how_fast_its_path_is(n_readers: int) -> None:
    core = Core("decode-0", "kvstore-0", prior_bandwidth=1e6, placement="min_ttft")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=0.0, c1_s=1.0), home_kvstore="kvstore-9")
    core.join("kvstore-1")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=0.0, c1_s=1.0), home_kvstore="kvstore-0")
    core.hold("kvstore-1", a_request(n_tokens=100), 5)
    for i in range(n_readers):
        core.arrive(f"cmpl-{i + 1}", n_tokens=100)
        core.reserved(rid=f"cmpl-{i + 1}")
    # Another read meanwhile leaves each half of what the source can send.
    core.prefilled(fetched_bytes=11_000_000, fetch_s=1.0)
    seen = 11e6 * n_readers
    assert core.conductor.costs.bandwidth(K1, P0) > 1e6
    for _ in range(100):
        core.conductor.costs.observe_transfer(K1, P0, 11_000_000, 1.0, n_readers - 1)
    assert core.conductor.costs.bandwidth(K1, P0) == pytest.approx(seen)
    core.arrive("cmpl-9", n_tokens=100)
    chosen = core.conductor.decisions[-1].placement.chosen
    n_bytes = 5 * LAYOUT.block_bytes
    assert chosen.transfer_s == pytest.approx(n_bytes / seen * n_readers)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [["decode-0"], ["prefill-0"], [], ["kvstore-0"]])
def test_without_a_prefill_or_a_decode_worker_a_request_is_unavailable(present: list[str]) -> None:
    reject = only(Core(*present).arrive(), Reject)
    assert (reject.kind, reject.retry_after_s) == ("unavailable", 1.0)


def test_refusals_are_counted_by_what_was_lacking() -> None:
    core = Core("prefill-0")
    core.arrive()
    core.join("decode-0")
    core.arrive("cmpl-2", n_tokens=4090)
    core.arrive("cmpl-3")
    core.refused(rid="cmpl-3", retryable=False)
    assert core.conductor.refusals == {"unavailable": 1, "too_long": 2}


def test_a_request_goes_to_workers_with_the_features_that_it_needs() -> None:
    core = Core()
    for name in ("prefill-0", "decode-0"):
        core.join(name, features=())
    for name in ("prefill-1", "decode-1"):
        core.join(name, features=("logprobs", "a feature of a later version"))
    for i in range(8):
        scored = a_request(f"cmpl-{i}", sampling=Sampling(temperature=0.0, logprobs=1))
        ((worker, _),) = sent(core.arrive(scored))
        assert worker == "decode-1"
        core.reserved("decode-1", f"cmpl-{i}")
        assert core.conductor.prefill_of(RequestId(f"cmpl-{i}")) == "prefill-1"
    # Plain requests go to workers of both kinds.
    assert sent(core.arrive("plain", n_tokens=40)) == [(D0, ReserveDecode)]


def test_a_request_that_needs_what_no_worker_has_is_refused_by_that_name() -> None:
    core = Core()
    core.join("prefill-0", features=("logprobs", "sampling"))
    core.join("decode-0", features=("sampling",))
    reject = only(core.arrive(a_request(sampling=Sampling(logprobs=1))), Reject)
    assert reject.kind == "unsupported"
    assert "no decode worker of this cluster has logprobs" in reject.reason
    assert core.conductor.refusals == {"unsupported": 1}
    core.join("decode-1", features=("logprobs", "sampling"))
    assert sent(core.arrive(a_request("2", sampling=Sampling(logprobs=1)))) == [
        (WorkerId("decode-1"), ReserveDecode)
    ]


@pytest.mark.parametrize("features", [None, ()])
def test_the_end_of_a_try_is_said_once_but_to_workers_of_before(
    features: tuple[str, ...] | None,
) -> None:
    core = Core("prefill-0")
    core.join("decode-0", features=features)
    (reserve,) = [c.message for c in core.arrive() if isinstance(c, Send)]
    assert isinstance(reserve, ReserveDecode)
    assert reserve.stopping.max_new_tokens == 8
    core.reserved()
    (start,) = [c.message for c in core.prefilled() if isinstance(c, Send)]
    assert isinstance(start, StartDecode)
    assert start.stopping == (reserve.stopping if features is None else None)


def test_draining_workers_get_nothing_new() -> None:
    core = Core("prefill-0", "decode-0")
    core.join("prefill-0", draining=True)
    assert only(core.arrive(), Reject).kind == "unavailable"


def test_a_worker_that_drains_finishes_what_it_has() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    assert core.join("decode-0", draining=True) == []
    assert sent(core.reserved()) == [(P0, StartPrefill)]
    assert sent(core.prefilled()) == [(D0, StartDecode)]


def test_a_prompt_over_the_context_is_too_long_with_both_numbers() -> None:
    reject = only(Core("prefill-0", "decode-0").arrive(n_tokens=4090, max_new_tokens=7), Reject)
    assert reject.kind == "too_long"
    assert "4090 tokens and up to 7 new ones are 4097" in reject.reason
    assert "4096 tokens" in reject.reason


def test_a_prompt_over_every_decode_pool_is_too_long_with_both_numbers() -> None:
    core = Core("prefill-0", "decode-0")
    core.join("prefill-0", n_blocks=0)
    reject = only(core.arrive(n_tokens=1020, max_new_tokens=8), Reject)
    assert reject.kind == "too_long"
    assert "need 65 pages of 16 tokens; the largest decode worker has 64" in reject.reason
    assert sent(core.arrive(n_tokens=1017, max_new_tokens=8)) == [(D0, ReserveDecode)]


def test_a_prompt_over_every_prefill_pool_is_too_long() -> None:
    core = Core("decode-0")
    core.join("prefill-0", n_blocks=2)
    assert "the largest prefill worker has 2" in only(core.arrive(), Reject).reason


def test_a_long_prompt_goes_to_the_worker_that_can_hold_it() -> None:
    core = Core("prefill-0", "decode-0")
    core.join("prefill-0", n_blocks=0)
    core.join("decode-1", n_blocks=256, decode_cost=DecodeCost(d0_s=9.0))
    assert sent(core.arrive(n_tokens=2000)) == [(D1, ReserveDecode)]


def test_a_predicted_miss_is_refused_before_anything_is_spent() -> None:
    core = Core("decode-0", admission="early", ttft_slo_s=15.0)
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    assert sent(core.arrive("cmpl-1")) == [(D0, ReserveDecode)]
    reject = only(core.arrive("cmpl-2"), Reject)
    assert (reject.kind, reject.retry_after_s) == ("overloaded", 5.0)
    assert sent(core.arrive("cmpl-3", ttft_slo_s=20.0)) == [(D0, ReserveDecode)]


def test_a_retry_is_never_refused_for_its_slo() -> None:
    core = Core("decode-0", admission="early", ttft_slo_s=0.001)
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0))
    assert sent(core.arrive(retry_id(R1, 2), attempt=2)) == [(D0, ReserveDecode)]


# -- decode pools full -------------------------------------------------------------------------


def test_a_refused_reservation_is_tried_at_another_decode_worker() -> None:
    core = Core("prefill-0", "decode-0", "decode-1")
    assert sent(core.arrive()) == [(D0, ReserveDecode)]
    assert sent(core.refused("decode-0")) == [(D1, ReserveDecode)]
    assert core.refused("decode-1") == []
    assert core.phase() is Phase.WAITING


def test_who_waits_is_served_when_a_load_shows_room() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive(n_tokens=40, max_new_tokens=30)  # three pages, and one to grow into
    core.refused()
    assert core.load(free_pages=3) == []
    assert sent(core.load(free_pages=4)) == [(D0, ReserveDecode)]


def test_who_waits_is_served_when_a_request_finishes() -> None:
    core = Core("prefill-0", "decode-0")
    core.join("decode-0", n_blocks=64)
    decoding(core, n_tokens=900)
    assert core.arrive("cmpl-2", n_tokens=400) == []
    assert core.n_requests == {"decoding": 1, "waiting": 1}
    assert sent(core.handle(RequestFinished(R1))) == [(D0, ReserveDecode)]


def test_who_waits_is_served_when_a_worker_that_was_full_may_be_asked_again() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    full = DecodeRefused(request_id=R1, reason="full", retryable=True, retry_after_s=3.0)
    assert core.hear("decode-0", full) == []
    assert core.handle(Tick(), 2.9) == []
    assert sent(core.handle(Tick(), 3.0)) == [(D0, ReserveDecode)]


@pytest.mark.parametrize("by", ["prefill", "decode", "time"])
def test_who_waits_is_served_when_the_landing_of_a_client_gone_is_freed(by: str) -> None:
    core = Core("prefill-0", "decode-0", reserve_timeout_s=5.0)
    start_prefill(core, n_tokens=900)
    assert core.arrive("cmpl-2", n_tokens=400) == []
    assert sent(core.handle(RequestCancelled(R1))) == [(P0, Cancel)]
    if by == "prefill":
        commands = core.hear("prefill-0", PrefillStopped(request_id=R1))
    elif by == "decode":
        ran_out = DecodeFailed(request_id=R1, reason="the landing ran out", retryable=True)
        commands = core.hear("decode-0", ran_out)
    else:
        commands = core.handle(Tick(), 5.0)
    assert (D0, ReserveDecode) in sent(commands)


def test_nobody_overtakes_those_who_wait() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core, n_tokens=900)
    core.arrive("cmpl-2", n_tokens=400)
    assert core.arrive("cmpl-3", n_tokens=16) == []
    commands = core.handle(RequestFinished(R1))
    assert [message.message.request_id for message in commands] == ["cmpl-2", "cmpl-3"]  # type: ignore[union-attr]


def test_who_was_refused_waits_in_front_of_those_who_came_later() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive("cmpl-1")
    core.load(free_pages=0)
    core.arrive("cmpl-2")
    core.refused(rid="cmpl-1")
    ids = [c.message.request_id for c in core.load(free_pages=64)]  # type: ignore[union-attr]
    assert ids == ["cmpl-1", "cmpl-2"]


def test_a_full_line_refuses_new_requests_but_not_retries() -> None:
    core = Core("prefill-0", "decode-0", max_waiting=1)
    core.load(free_pages=0)
    core.arrive("cmpl-1")
    reject = only(core.arrive("cmpl-2"), Reject)
    assert reject.kind == "overloaded"
    assert "1 requests wait" in reject.reason
    assert core.arrive("cmpl-3~2", attempt=2) == []
    assert core.n_requests == {"waiting": 2}


def test_waiting_ends_with_the_slo_or_the_timeout() -> None:
    core = Core("prefill-0", "decode-0", admission="early", request_timeout_s=100.0)
    core.load(free_pages=0)
    core.arrive("cmpl-1", ttft_slo_s=5.0)
    core.arrive("cmpl-2")
    core.arrive("cmpl-3~2", attempt=2)
    core.load(free_pages=0)
    reject = only(core.handle(Tick(), 5.0), Reject)
    assert (reject.request_id, reject.kind) == (R1, "overloaded")
    rejects = core.handle(Tick(), 100.0)
    assert [(r.request_id, r.kind) for r in rejects if isinstance(r, Reject)] == [
        (R2, "overloaded"),
        ("cmpl-3~2", "overloaded"),
    ]


def test_without_admission_nobody_is_refused_for_a_limit_while_waiting() -> None:
    core = Core("prefill-0", "decode-0", ttft_slo_s=5.0, request_timeout_s=100.0)
    core.now = 100.0
    core.load(free_pages=0)
    core.arrive()
    core.load(free_pages=0)
    assert core.handle(Tick(), 199.0) == []
    core.load(free_pages=0)
    assert only(core.handle(Tick(), 200.0), Reject).reason == "no decode pages came free in 100 s"


def test_who_waited_in_vain_hears_why_and_when_to_come_back() -> None:
    core = Core("prefill-0", "decode-0", request_timeout_s=100.0)
    core.arrive()
    core.reserved()
    core.prefilled()
    core.now = 40.0
    core.handle(RequestFinished(R1, 8))
    core.arrive("cmpl-3")
    core.reserved(rid="cmpl-3")
    core.prefilled(rid="cmpl-3")
    core.arrive("cmpl-2")
    core.load(free_pages=0)
    core.refused(rid="cmpl-2")
    core.now = 140.0
    reject = only(core.handle(Tick(), 140.0), Reject)
    assert reject.reason == "no decode worker had room for 100 s; decode-0: 0 of 64 pages are free"
    assert reject.retry_after_s > 30


def test_who_waits_hears_when_nobody_is_left() -> None:
    core = Core("prefill-0", "decode-0")
    core.load(free_pages=0)
    core.arrive()
    assert core.lose("decode-0") == []
    core.now = 9.9
    assert core.arrive("cmpl-2") == []
    assert core.handle(Tick(), 9.9) == []
    rejects = core.handle(Tick(), 10.0)
    assert [(r.request_id, r.kind, r.reason) for r in rejects if isinstance(r, Reject)] == [
        (rid, "unavailable", "no decode worker is live that takes requests")
        for rid in (R1, "cmpl-2")
    ]
    assert only(core.arrive("cmpl-3"), Reject).kind == "unavailable"


@pytest.mark.parametrize("lost", [("decode-0",), ("prefill-0",), ("prefill-0", "decode-0")])
def test_requests_wait_for_workers_that_come_back(lost: tuple[str, ...]) -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    resubmits = [c for name in lost for c in core.lose(name) if isinstance(c, Resubmit)]
    assert [resubmit.request_id for resubmit in resubmits] == [R1]
    assert core.arrive("cmpl-1~2", attempt=2) == core.arrive("cmpl-2") == []
    core.now = 8.0
    commands = [c for name in lost for c in core.handle(WorkerJoined(a_worker(name)))]
    assert sent(commands) == [("decode-0", ReserveDecode)] * 2


def test_requests_do_not_wait_for_a_worker_that_was_told_to_leave() -> None:
    core = Core("prefill-0", "decode-0")
    core.handle(WorkerJoined(a_worker("decode-0", draining=True)))
    core.lose("decode-0")
    assert only(core.arrive(), Reject).kind == "unavailable"


def test_requests_that_wait_end_when_another_model_comes() -> None:
    core = Core("prefill-0", "decode-0")
    for name in ("prefill-0", "decode-0"):
        core.lose(name)
    assert core.arrive() == []
    other = msgspec.structs.replace(LAYOUT, n_layers=LAYOUT.n_layers + 1)
    reject = only(core.handle(WorkerJoined(a_worker("decode-1", layout=other))), Reject)
    assert (reject.request_id, reject.kind) == (R1, "unavailable")
    assert core.conductor.cluster.layout == other
    assert core.n_requests == {}


def test_a_refusal_for_ever_is_too_long() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    assert only(core.refused(retryable=False), Reject).kind == "too_long"
    core.arrive("cmpl-2~2", attempt=2)
    assert only(core.refused(rid="cmpl-2~2", retryable=False), Reject).kind == "too_long"


@pytest.mark.parametrize(
    ("code", "kind"), [("too_long", Reject), ("invalid", Fail), ("layout_mismatch", Fail)]
)
def test_a_refusal_for_ever_for_another_reason_is_not_called_too_long(
    code: str, kind: type
) -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    ended: Any = only(core.refused(retryable=False, code=code), kind)
    assert "0 of 64 pages" in ended.reason


def test_a_decode_worker_that_does_not_answer_is_left_for_another() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    core.arrive()
    assert core.handle(Tick(), 4.9) == []
    assert sent(core.handle(Tick(), 5.0)) == [(D0, Cancel), (D1, ReserveDecode)]
    # Its late answer frees what it holds.
    assert core.reserved("decode-0") == [Send(D0, Cancel(request_id=R1))]
    assert sent(core.reserved("decode-1")) == [(P0, StartPrefill)]


def test_a_silent_decode_worker_gets_nothing_new_for_as_long_as_it_was_waited_for() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    core.arrive()
    core.handle(Tick(), 5.0)  # now it is at decode-1, which makes decode-0 the idle one
    core.now = 9.9
    assert sent(core.arrive("cmpl-2")) == [(D1, ReserveDecode)]
    core.now = 10.0
    assert sent(core.arrive("cmpl-3")) == [(D0, ReserveDecode)]


def test_a_silent_decode_worker_is_asked_again_only_under_another_id() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    core.arrive()
    core.handle(Tick(), 5.0)
    core.refused("decode-1")
    assert core.load("decode-0") == []
    assert core.phase() is Phase.WAITING
    assert core.lose("decode-1") == [Resubmit(R1, "no answer from decode-0")]
    core.load("decode-0")
    assert sent(core.arrive("cmpl-1~2", attempt=2)) == [(D0, ReserveDecode)]


def test_when_the_only_decode_worker_is_silent_another_try_is_made() -> None:
    core = Core("prefill-0", "decode-0", reserve_timeout_s=5.0)
    core.arrive()
    cancel, again = core.handle(Tick(), 5.0)
    assert cancel == Send(D0, Cancel(request_id=R1))
    assert again == Resubmit(R1, "no answer from decode-0")


def test_when_all_but_an_avoided_decode_worker_are_silent_another_try_is_made() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    start_prefill(core)
    failed = PrefillFailed(request_id=R1, reason="no", retryable=True, culprit=D0)
    core.hear("prefill-0", failed)
    assert sent(core.arrive("cmpl-1~2", attempt=2)) == [(D1, ReserveDecode)]
    # It would wait for ever, with all others behind it: only decode-1 could let it go on.
    cancel, again = core.handle(Tick(), 5.0)
    assert cancel == Send(D1, Cancel(request_id=RequestId("cmpl-1~2")))
    assert again == Resubmit(RequestId("cmpl-1~2"), "no answer from decode-1")
    assert sent(core.arrive("cmpl-2")) == [(D0, ReserveDecode)]


# -- failures -----------------------------------------------------------------------------------


def test_a_failed_prefill_frees_the_landing_and_is_tried_again() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    message = PrefillFailed(request_id=R1, reason="out of memory", retryable=True)
    cancel, again = core.hear("prefill-0", message)
    assert cancel == Send(D0, Cancel(request_id=R1))
    assert again == Resubmit(R1, "prefill at prefill-0 failed: out of memory")
    assert core.n_requests == {}


def test_what_can_not_succeed_is_not_tried_again() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    message = PrefillFailed(request_id=R1, reason="no such token", retryable=False)
    _, fail = core.hear("prefill-0", message)
    assert fail == Fail(R1, "prefill at prefill-0 failed: no such token")


def test_after_the_last_try_without_a_token_it_fails() -> None:
    core = Core("prefill-0", "decode-0", max_attempts=2)
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    fail = core.lose("decode-0")[-1]
    assert isinstance(fail, Fail)
    assert "(2 tries in a row brought no token)" in fail.reason


def test_a_try_that_delivered_tokens_is_not_counted_however_many_there_were() -> None:
    core = Core("prefill-0", "decode-0", max_attempts=1)
    core.arrive("cmpl-1~9", attempt=9, fruitless=1)
    core.reserved(rid="cmpl-1~9")
    core.prefilled(rid="cmpl-1~9")
    preempted = DecodeFailed(request_id=RequestId("cmpl-1~9"), reason="preempted", retryable=True)
    assert isinstance(only(core.hear("decode-0", preempted), Resubmit), Resubmit)


@pytest.mark.parametrize("culprit", [D0, None])
def test_the_next_try_goes_to_other_workers_if_there_are_any(culprit: WorkerId | None) -> None:
    core = Core("prefill-0", "prefill-1", "decode-0", "decode-1")
    failed = PrefillFailed(request_id=R1, reason="no", retryable=True, culprit=culprit)
    start_prefill(core)
    core.hear("prefill-0", failed)
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    placement = core.conductor.decisions[-1].placement
    first = (P0, D1) if culprit else (P1, D0)
    assert (placement.chosen.worker_id, placement.decode) == first
    core.lose("decode-1" if culprit else "prefill-1")
    core.arrive("cmpl-1~3", attempt=3, fruitless=2)
    placement = core.conductor.decisions[-1].placement
    assert (placement.chosen.worker_id, placement.decode) == (P0, D0)


@pytest.mark.parametrize(
    "way", ["finished", "at its first token", "cancelled", "failed", "too long"]
)
def test_where_a_request_failed_is_forgotten_when_it_is_over(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so many are remembered: what is over may not push out what is not."""
    monkeypatch.setattr(placer, "MAX_AVOIDED", 2)
    core = Core("prefill-0", "prefill-1", "decode-0")

    def fail_at_prefill_0(rid: str) -> None:
        core.arrive(rid)
        assert sent(core.reserved(rid=rid)) == [(P0, StartPrefill)]
        core.hear("prefill-0", PrefillFailed(request_id=RequestId(rid), reason="", retryable=True))

    fail_at_prefill_0("cmpl-1")
    fail_at_prefill_0("cmpl-2")
    core.arrive("cmpl-2~2", attempt=2, fruitless=1)
    if way == "cancelled":
        core.handle(RequestCancelled(RequestId("cmpl-2~2")))
    elif way == "too long":
        core.refused(rid="cmpl-2~2", retryable=False)
    else:
        core.reserved(rid="cmpl-2~2")
    if way == "failed":
        no = PrefillFailed(request_id=RequestId("cmpl-2~2"), reason="", retryable=False)
        core.hear("prefill-1", no)
    elif way in ("finished", "at its first token"):
        core.prefilled("prefill-1", "cmpl-2~2", finish="" if way == "finished" else "stop")
        core.handle(RequestFinished(RequestId("cmpl-2~2")))
    assert core.n_requests == {}
    fail_at_prefill_0("cmpl-3")
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    assert core.conductor.decisions[-1].placement.prefill == P1


def test_of_too_many_requests_that_failed_the_one_of_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placer, "MAX_AVOIDED", 1)
    core = Core("prefill-0", "prefill-1", "decode-0")
    for rid in ("cmpl-1", "cmpl-2"):
        core.arrive(rid)
        core.reserved(rid=rid)
        core.hear("prefill-0", PrefillFailed(request_id=RequestId(rid), reason="", retryable=True))
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    assert core.conductor.decisions[-1].placement.prefill == P0
    core.handle(RequestCancelled(RequestId("cmpl-1~2")))
    core.arrive("cmpl-2~2", attempt=2, fruitless=1)
    assert core.conductor.decisions[-1].placement.prefill == P1


def test_a_failed_decode_is_tried_again() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core)
    message = DecodeFailed(request_id=R1, reason="preempted", retryable=True)
    assert isinstance(only(core.hear("decode-0", message), Resubmit), Resubmit)


def test_a_landing_that_ran_out_stops_its_prefill() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    message = DecodeFailed(request_id=R1, reason="the landing ran out", retryable=True)
    cancel, again = core.hear("decode-0", message)
    assert cancel == Send(P0, Cancel(request_id=R1))
    assert isinstance(again, Resubmit)


def test_a_lost_decode_worker_stops_prefill_and_the_request_is_tried_again() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    cancel, again = core.lose("decode-0")
    assert cancel == Send(P0, Cancel(request_id=R1))
    assert again == Resubmit(R1, "decode-0 is lost: socket closed")
    assert core.n_requests == {}


def test_a_lost_prefill_worker_leaves_the_landing_in_doubt() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    cancel, again = core.lose("prefill-0")
    assert cancel == Send(D0, Cancel(request_id=R1, landing_in_doubt=True))
    assert isinstance(again, Resubmit)


def test_a_prefill_worker_lost_before_it_was_told_leaves_no_doubt() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    cancel, _ = core.lose("prefill-0")
    assert cancel == Send(D0, Cancel(request_id=R1))


def test_a_prefill_worker_lost_while_decoding_harms_nobody() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core)
    assert core.lose("prefill-0") == []
    assert core.phase() is Phase.DECODING


def test_a_lost_kvstore_harms_no_request() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0")
    core.hold("kvstore-0", a_request(n_tokens=100), 5)
    start_prefill(core, n_tokens=100)
    assert core.lose("kvstore-0") == []
    assert sent(core.prefilled()) == [(D0, StartDecode)]
    assert len(core.conductor.index) == 0


def test_a_prefill_that_takes_too_long_is_given_up() -> None:
    core = Core("prefill-0", "decode-0", request_timeout_s=100.0)
    start_prefill(core)
    cancel, again = core.handle(Tick(), 100.0)
    assert cancel == Send(P0, Cancel(request_id=R1))
    assert again == Resubmit(R1, "prefill-0 did not finish in 100 s", Casualty(P0, 1))
    assert core.n_requests == {"stopping": 1}


def test_a_kvstore_that_could_not_be_reached_is_forgotten_and_not_used_again() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0")
    request = a_request(n_tokens=100)
    core.hold("kvstore-0", request, 5)
    assert start_prefill(core, n_tokens=100).cached is not None
    message = PrefillFailed(request_id=R1, reason="no route", retryable=True, culprit=K0)
    assert (K0, SnapshotBlocks) in sent(core.hear("prefill-0", message))
    assert len(core.conductor.index) == 0
    core.hold("kvstore-0", request, 5)
    core.arrive("cmpl-1~2", n_tokens=100, attempt=2)
    start = message_to(core.reserved(rid="cmpl-1~2"), P0)
    assert (start.cached, start.store_in) == (None, None)
    core.arrive("cmpl-2", n_tokens=100)
    assert message_to(core.reserved(rid="cmpl-2"), P0).cached is not None


# -- clients that go -----------------------------------------------------------------------------


def test_a_client_gone_while_waiting_leaves_the_line() -> None:
    core = Core("prefill-0", "decode-0")
    core.load(free_pages=0)
    core.arrive()
    assert core.handle(RequestCancelled(R1)) == []
    assert core.n_requests == {}


def test_a_client_gone_while_reserving_frees_the_pages_also_if_they_are_granted_late() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    cancel = Send(D0, Cancel(request_id=R1))
    assert core.handle(RequestCancelled(R1)) == [cancel]
    assert core.reserved() == [cancel]


@pytest.mark.parametrize("answer", ["stopped", "done", "failed"])
def test_the_landing_of_a_client_gone_is_freed_once_prefill_writes_no_more(answer: str) -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    assert core.handle(RequestCancelled(R1)) == [Send(P0, Cancel(request_id=R1))]
    assert core.n_requests == {"stopping": 1}
    assert core.reserved() == []
    freed = [Send(D0, Cancel(request_id=R1))]
    if answer == "stopped":
        assert core.hear("prefill-0", PrefillStopped(request_id=R1)) == freed
    elif answer == "done":
        assert core.prefilled() == freed
    else:
        message = PrefillFailed(request_id=R1, reason="", retryable=True)
        assert core.hear("prefill-0", message) == freed
    assert core.n_requests == {}
    assert core.hear("prefill-0", PrefillStopped(request_id=R1)) == []


def test_a_prefill_that_does_not_say_that_it_stopped_leaves_the_landing_in_doubt() -> None:
    core = Core("prefill-0", "decode-0", reserve_timeout_s=5.0)
    start_prefill(core)
    core.handle(RequestCancelled(R1))
    in_doubt = [Send(D0, Cancel(request_id=R1, landing_in_doubt=True))]
    assert core.handle(Tick(), 5.0) == in_doubt


@pytest.mark.parametrize("in_doubt", [False, True])
@pytest.mark.parametrize("answer", ["stopped", "failed while it was stopped", "failed"])
def test_decode_is_told_whether_a_prefill_that_ended_leaves_the_landing_in_doubt(
    answer: str, in_doubt: bool
) -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    if answer != "failed":
        core.handle(RequestCancelled(R1))
    stopped = PrefillStopped(request_id=R1, landing_in_doubt=in_doubt)
    failed = PrefillFailed(
        request_id=R1, reason="no route", retryable=True, landing_in_doubt=in_doubt
    )
    commands = core.hear("prefill-0", stopped if answer == "stopped" else failed)
    cancels = [command for command in commands if isinstance(command, Send)]
    assert cancels == [Send(D0, Cancel(request_id=R1, landing_in_doubt=in_doubt))]


def test_a_prefill_lost_while_it_is_stopped_leaves_the_landing_in_doubt() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    core.handle(RequestCancelled(R1))
    assert core.lose("prefill-0") == [Send(D0, Cancel(request_id=R1, landing_in_doubt=True))]


def test_a_client_gone_while_decoding_frees_the_pages() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core)
    assert core.handle(RequestCancelled(R1)) == [Send(D0, Cancel(request_id=R1))]
    assert core.n_requests == {}


def test_a_landing_that_decode_let_go_is_not_freed_again_when_prefill_stops() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    core.handle(RequestCancelled(R1))
    ran_out = DecodeFailed(request_id=R1, reason="the landing ran out", retryable=True)
    assert core.hear("decode-0", ran_out) == []
    assert core.n_requests == {}
    assert core.hear("prefill-0", PrefillStopped(request_id=R1)) == []


# -- late and doubled messages -------------------------------------------------------------------


def test_a_request_that_arrives_twice_is_taken_once() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    assert core.arrive() == []


def test_a_request_whose_prefill_is_being_stopped_is_not_taken_again_under_its_id() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    core.handle(RequestCancelled(R1))
    assert core.arrive() == []
    assert core.n_requests == {"stopping": 1}


def test_answers_said_twice_are_heard_once() -> None:
    core = Core("prefill-0", "decode-0")
    start_prefill(core)
    assert core.reserved() == []
    core.prefilled()
    assert core.prefilled() == []
    assert core.reserved() == []


def test_answers_from_the_wrong_worker_are_ignored() -> None:
    core = Core("prefill-0", "prefill-1", "decode-0", "decode-1")
    start_prefill(core)
    assert core.prefilled("prefill-1") == []
    failed = DecodeFailed(request_id=R1, reason="", retryable=True)
    assert core.hear("decode-1", failed) == []
    assert core.phase() is Phase.PREFILLING


def test_a_refusal_is_heard_only_while_its_request_waits_for_that_answer() -> None:
    core = Core("prefill-0", "decode-0", "decode-1")
    assert core.refused() == []
    core.arrive()
    assert core.refused("decode-1") == []
    core.reserved()
    assert core.refused() == []
    assert core.phase() is Phase.PREFILLING


def test_a_lost_worker_is_not_heard_and_not_spoken_to() -> None:
    core = Core("prefill-0", "decode-0")
    core.lose("decode-0")
    assert core.reserved() == []
    assert core.lose("decode-0") == []


# -- workers -----------------------------------------------------------------------------------


def test_a_worker_with_another_layout_is_refused_with_both_values() -> None:
    core = Core("prefill-0")
    other = msgspec.structs.replace(LAYOUT, block_size=32, dtype="bfloat16")
    refuse = only(core.join("decode-0", layout=other), RefuseWorker)
    assert refuse.worker_id == D0
    assert "block_size is 16 at the cluster, 32 at decode-0" in refuse.reason
    assert "dtype is 'float32' at the cluster, 'bfloat16' at decode-0" in refuse.reason
    assert core.conductor.cluster.get(D0) is None


def test_a_kvstore_without_a_layout_is_welcome_a_decode_worker_is_not() -> None:
    core = Core("prefill-0")
    assert core.join("kvstore-0", layout=None) == [Send(K0, SnapshotBlocks(page=PAGE))]
    assert "states no KV layout" in only(core.join("decode-0", layout=None), RefuseWorker).reason


def test_a_worker_of_another_model_is_refused_with_both_names() -> None:
    core = Core("prefill-0")
    refuse = only(core.join("decode-0", model="large-chat"), RefuseWorker)
    assert "model is 'tiny-chat' at the cluster, 'large-chat' at decode-0" in refuse.reason


def test_a_block_size_by_settings_is_required_of_the_first_worker_too() -> None:
    core = Core(block_size=32)
    refuse = only(core.join("prefill-0"), RefuseWorker)
    assert "block_size is 32 by the conductor's settings, 16 at prefill-0" in refuse.reason


def test_a_worker_whose_blocks_no_prompt_is_cut_into_is_refused() -> None:
    core = Core()
    small = msgspec.structs.replace(LAYOUT, block_size=8)
    refuse = only(core.join("prefill-0", layout=small), RefuseWorker)
    assert "block_size is 8, allowed are 16 to 512 tokens, at prefill-0" in refuse.reason


def test_with_the_last_worker_the_layout_is_forgotten() -> None:
    core = Core("prefill-0", "decode-0")
    other = msgspec.structs.replace(LAYOUT, block_size=32)
    core.lose("prefill-0")
    assert isinstance(core.join("prefill-0", layout=other)[0], RefuseWorker)
    core.lose("decode-0")
    assert core.join("prefill-0", layout=other) == []


def test_a_worker_that_changes_its_layout_is_lost_and_refused() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core)
    other = msgspec.structs.replace(LAYOUT, block_size=32)
    again, refuse = core.join("decode-0", layout=other)
    assert isinstance(again, Resubmit)
    assert isinstance(refuse, RefuseWorker)


def test_a_worker_started_again_has_lost_what_it_had() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core)
    again = only(core.join("decode-0", generation=2), Resubmit)
    assert again.reason == "decode-0 is lost: it was started again"
    assert sent(core.arrive("cmpl-2")) == [(D0, ReserveDecode)]


def test_a_kvstore_started_again_is_asked_what_it_holds_now() -> None:
    core = Core("kvstore-0")
    core.hold("kvstore-0", a_request(), 2)
    assert core.join("kvstore-0", generation=2) == [Send(K0, SnapshotBlocks(page=PAGE))]
    assert len(core.conductor.index) == 0


def test_late_word_of_an_earlier_start_is_ignored() -> None:
    core = Core("prefill-0")
    core.join("decode-0", generation=2)
    decoding(core)
    assert core.join("decode-0", generation=1) == []
    assert core.phase() is Phase.DECODING


def test_a_changed_record_loses_no_request() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0")
    core.hold("kvstore-0", a_request(), 2)
    decoding(core)
    assert core.hear("decode-0", Welcome(worker=a_worker("decode-0", n_blocks=99))) == []
    assert core.join("kvstore-0") == []
    assert core.phase() is Phase.DECODING
    assert len(core.conductor.index) == 2


def test_a_gap_in_a_kvstores_events_asks_for_a_snapshot_again_until_it_comes() -> None:
    core = Core("kvstore-0", snapshot_timeout_s=5.0)
    core.hold("kvstore-0", a_request(), 0)
    stored = BlockStored(
        block_hashes=a_request().block_hashes,
        parent_block_hash=None,
        token_ids=(),
        block_size=16,
    )
    gap = KvChanged(K0, KvEventBatch(3, 0.0, (stored,)))
    assert core.handle(gap, 1.0) == [Send(K0, SnapshotBlocks(page=PAGE))]
    assert core.handle(Tick(), 5.9) == []
    assert core.handle(Tick(), 6.0) == [Send(K0, SnapshotBlocks(page=PAGE))]
    core.hear("kvstore-0", BlocksSnapshot(sequence=2, hashes=()))
    assert len(core.conductor.index) == len(a_request().block_hashes)
    assert core.handle(Tick(), 60.0) == []


def test_an_event_that_nothing_follows_is_missed_once_the_kvstore_says_how_far_it_is() -> None:
    core = Core("kvstore-0")
    core.hold("kvstore-0", a_request(), 0)

    def load(sequence: int) -> KvstoreLoad:
        return KvstoreLoad(n_stored=1, n_reserved=0, n_leased=0, n_blocks=8, sequence=sequence)

    assert core.hear("kvstore-0", load(-1)) == []
    assert core.hear("kvstore-0", load(0)) == [Send(K0, SnapshotBlocks(page=PAGE))]
    assert core.hear("kvstore-0", load(0)) == []
    hashes = a_request().block_hashes
    core.hear("kvstore-0", BlocksSnapshot(sequence=0, hashes=hashes))
    assert len(core.conductor.index) == len(hashes)


# -- what the metrics show -----------------------------------------------------------------------


def test_loads_are_the_pools_means_over_the_limits() -> None:
    core = Core(admission="none", ttft_slo_s=40.0, tbt_slo_s=0.5)
    for name in ("prefill-0", "prefill-1"):
        core.join(name, prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    for name in ("decode-0", "decode-1"):
        core.join(name, decode_cost=DecodeCost(d0_s=0.1, d1_s=0.1, d2_s=0.0))
    assert core.conductor.loads(0.0) == (0.0, 0.0)
    core.arrive()
    assert core.conductor.loads(4.0) == pytest.approx((6.0 / 2 / 40.0, 0.0))
    core.reserved()
    core.prefilled()
    assert core.conductor.loads(4.0) == pytest.approx((0.0, 0.2 / 2 / 0.5))


def test_loads_without_limits_are_seconds() -> None:
    core = Core("decode-0")
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    core.arrive()
    assert core.conductor.loads(4.0) == (6.0, 0.0)
    assert Core().conductor.loads(0.0) == (0.0, 0.0)


def test_first_tokens_and_steps_are_compared_with_what_was_predicted() -> None:
    core = Core()
    core.join("prefill-0", prefill_cost=PrefillCost(c0_s=10.0, c1_s=0.0))
    core.join("decode-0", decode_cost=DecodeCost(d0_s=0.1, d1_s=0.0, d2_s=0.0))
    core.now = 100.0
    start_prefill(core)
    assert core.conductor.prefill_of(R1) == P0
    core.now = 120.0
    core.prefilled()
    core.now = 121.2
    core.handle(RequestFinished(R1, n_new=5))
    assert core.conductor.prefill_of(R1) is None
    ttft, tbt = (core.conductor.prediction_errors.histograms[name] for name in ("ttft", "tbt"))
    assert (ttft.n, ttft.predicted_s, ttft.observed_s) == (1, 10.0, 20.0)
    assert (tbt.n, tbt.predicted_s) == (1, 0.1)
    assert tbt.observed_s == pytest.approx(1.2 / 4)
    assert ttft.ratio_sum == 2.0


def test_a_single_token_has_no_steps_to_compare() -> None:
    core = Core("prefill-0", "decode-0")
    decoding(core)
    core.now = 1.0
    assert core.handle(RequestFinished(R1, n_new=1)) == []
    assert core.conductor.prediction_errors.histograms["tbt"].n == 0
    core.arrive("cmpl-2")
    core.reserved(rid="cmpl-2")
    core.prefilled(rid="cmpl-2")
    core.handle(RequestFinished(R2, n_new=2))
    assert core.conductor.prediction_errors.histograms["tbt"].n == 1


def keeper_core() -> Core:
    """A cluster whose decode worker keeps answers."""
    core = Core("prefill-0", "kvstore-0")
    core.join("decode-0", keeps_answers=True)
    return core


def answer_chain(core: Core, **fields: Any) -> AnswerChain | None:
    """What decode is told about a request's answer."""
    core.arrive(**fields)
    core.reserved()
    start = message_to(core.prefilled(), "decode-0")
    assert isinstance(start, StartDecode)
    return start.answer_chain


def test_decode_is_told_where_the_chain_of_the_prompt_continues() -> None:
    request = a_request(n_tokens=2 * LAYOUT.block_size + 5, tenant="lab")
    core = keeper_core()
    chain = answer_chain(core, request=request)
    assert chain is not None and chain.store_in == core.conductor.cluster.address(K0)
    assert (chain.parent, chain.tenant) == (request.block_hashes[1], "lab")
    assert chain.tail == request.token_ids[-5:]


def test_a_chain_without_a_block_continues_at_its_root() -> None:
    chain = answer_chain(keeper_core(), n_tokens=3, cache_salt="lab")
    root = root_hash(model=LAYOUT.model, salt="lab", block_size=LAYOUT.block_size)
    assert chain is not None and (chain.parent, len(chain.tail)) == (root, 3)


def test_a_decode_worker_that_keeps_no_answers_is_told_nothing_of_them() -> None:
    assert answer_chain(Core("prefill-0", "decode-0", "kvstore-0")) is None
    without_kvstore = Core("prefill-0")
    without_kvstore.join("decode-0", keeps_answers=True)
    assert answer_chain(without_kvstore) is None


@pytest.mark.parametrize("restarted", [True, False])
def test_an_answer_is_not_kept_where_its_prompt_is_lost(restarted: bool) -> None:
    core = keeper_core()
    core.arrive()
    core.reserved()
    core.lose("kvstore-0")
    if restarted:
        core.join("kvstore-0", generation=7)
    assert message_to(core.prefilled(), "decode-0").answer_chain is None
