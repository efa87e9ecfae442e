"""What becomes of requests and workers: each event, and the commands that follow from it."""

import re
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.blocks import root_hash
from halfmoon_protocol.ids import RequestId, retry_id
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    CachedPrefix,
    Cancel,
    DecodeCost,
    KvstoreAddress,
    PrefillCost,
    ReserveDecode,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    Welcome,
)
from halfmoon_protocol.sampling import Sampling
from halfmoon_protocol.snapshots import PAGE
from halfmoon_scheduling.commands import Deliver, Fail, RefuseWorker, Reject, Resubmit, Send
from halfmoon_scheduling.conductor import placer
from halfmoon_scheduling.events import Casualty, KvChanged
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import LAYOUT, a_landing, a_request, a_worker
from tests.scheduling.core import (
    D0,
    D1,
    K0,
    K1,
    P0,
    P1,
    R1,
    R2,
    Core,
    asked,
    kv_stored,
    message_to,
    only,
    resubmitted,
    sent,
)

#: A prefill takes 10 s.
SLOW = PrefillCost(c0_s=10.0, c1_s=0.0)
FREED = Send(D0, Cancel(request_id=R1))
IN_DOUBT = Send(D0, Cancel(request_id=R1, landing_in_doubt=True))
STOPPED = Send(P0, Cancel(request_id=R1))
ASK_BLOCKS = Send(K0, SnapshotBlocks(page=PAGE))


def a_pair(**config: Any) -> Core:
    """A prefill and a decode worker."""
    return Core("prefill-0", "decode-0", **config)


def prefilling(**config: Any) -> Core:
    """A request is computed at prefill-0, for decode-0."""
    core = a_pair(**config)
    start_prefill(core)
    return core


def decoding(**fields: Any) -> Core:
    """A request is decoded at decode-0."""
    core = a_pair()
    core.run(**fields)
    assert core.phase() is Phase.DECODING
    return core


def start_prefill(core: Core, **fields: Any) -> StartPrefill:
    core.arrive(**fields)
    message = only(core.reserved(), Send).message
    assert isinstance(message, StartPrefill)
    return message


# -- the way of a request ------------------------------------------------------------------------


def test_a_request_is_reserved_then_prefilled_then_decoded() -> None:
    core, request = a_pair(), a_request()
    of_both: dict[str, Any] = {"request_id": R1, "stopping": request.stopping}
    assert core.arrive(request) == [Send(D0, ReserveDecode(n_tokens=40, **of_both))]
    assert core.phase() is Phase.RESERVING
    of_both |= {"sampling": request.sampling, "n_prompt": 40}
    start = StartPrefill(
        token_ids=request.token_ids,
        block_hashes=request.block_hashes,
        landing=a_landing("decode-0"),
        landing_expires_s=55.0,
        **of_both,
    )
    assert core.reserved() == [Send(P0, start)]
    assert core.phase() is Phase.PREFILLING
    assert core.prefilled(n_cached=16) == [
        Deliver(R1, 7, "", 16),
        Send(D0, StartDecode(first_token=7, **of_both)),
    ]
    assert core.finish() == []
    assert core.n_requests == {}
    core = prefilling()
    assert core.prefilled(finish="stop") == [Deliver(R1, 7, "stop", 0), FREED]
    assert core.n_requests == {}


def test_decode_gets_the_history_only_if_sampling_looks_at_it() -> None:
    core, request = a_pair(), a_request(sampling=Sampling(repetition_penalty=1.1))
    assert message_to(core.run(request), D0).history == request.token_ids


@pytest.mark.parametrize(
    ("granted_s", "expires_s", "left_s"),
    [(0.0, 6.0, 3.0), (4.0, 60.0, 51.0), (100.0, 60.0, 0.0)],
    ids=["half of a landing that is hardly longer", "less after a late grant", "none"],
)
def test_a_landing_may_be_written_until_a_margin_before_its_end(
    granted_s: float, expires_s: float, left_s: float
) -> None:
    core = a_pair(landing_margin_s=5.0)
    core.arrive()
    core.now = granted_s
    assert message_to(core.reserved(expires_s=expires_s), P0).landing_expires_s == left_s


@pytest.mark.parametrize(("own_s", "left_s"), [(None, 6.0), (10.0, 8.0), (1.0, 0.0)])
def test_prefill_is_told_in_how_many_seconds_the_first_token_is_due(
    own_s: float | None, left_s: float
) -> None:
    core = a_pair(ttft_slo_s=8.0)
    core.arrive(ttft_slo_s=own_s)
    core.now = 2.0
    assert message_to(core.reserved(), P0).deadline_s == left_s
    begun = msgspec.structs.replace(a_request(retry_id(R1, 2), n_tokens=40), n_prompt=30)
    core.arrive(begun)
    assert message_to(core.reserved(rid=begun.request_id), P0).deadline_s == 0.0


def test_prefill_is_told_where_the_prefix_is_nearest_first_and_where_to_store() -> None:
    core = Core("decode-0", *(f"kvstore-{i}" for i in range(5)))
    core.join("prefill-0", host="near", home_kvstore="kvstore-4")
    core.join("kvstore-3", host="near")
    for name, n_blocks in (("kvstore-0", 5), ("kvstore-1", 4), ("kvstore-2", 5), ("kvstore-3", 5)):
        core.hold(name, a_request(n_tokens=100), n_blocks)
    start = start_prefill(core, n_tokens=100)
    k0, k2, k3, k4 = (
        KvstoreAddress(core.conductor.cluster.get(name).worker_id, 1, f"memory://{name}/commands")  # type: ignore[union-attr, arg-type]
        for name in ("kvstore-0", "kvstore-2", "kvstore-3", "kvstore-4")
    )
    assert start.cached == CachedPrefix(k3, 5, replicas=(k0, k2))
    assert start.store_in == k4


def test_a_source_that_is_lost_before_prefill_starts_is_not_named() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0", "kvstore-1")
    core.hold("kvstore-1", a_request(n_tokens=100), 5)
    core.arrive(n_tokens=100)
    core.lose("kvstore-1")
    assert message_to(core.reserved(), P0).cached is None


def test_a_decode_worker_that_reports_slow_steps_is_avoided() -> None:
    core = Core("prefill-0")
    for name, step_s in (("decode-0", 0.05), ("decode-1", 0.01)):
        core.join(name, decode_cost=DecodeCost(d0_s=0.01, d1_s=0.0, d2_s=0.0))
        core.load(name, free_pages=60, n_running=1, context_tokens=9, step_s=step_s)
    assert sent(core.arrive()) == [(D1, ReserveDecode)]


# -- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetch_s", "next_s"),
    [(0.0, 11.0), (10.0, 10.0)],
    ids=["a tenth of what was seen", "but waits for cached blocks are no computing"],
)
def test_a_worker_that_prefills_slower_than_its_profile_says_is_expected_to(
    fetch_s: float, next_s: float
) -> None:
    core = Core("decode-0")
    core.join("prefill-0", prefill_cost=SLOW)
    start_prefill(core)
    core.now = 20.0
    core.prefilled(compute_s=20.0, fetch_s=fetch_s)
    core.arrive("cmpl-2")
    assert core.placement.ttft_s == pytest.approx(next_s)


@pytest.mark.parametrize("n_readers", [1, 2])
def test_a_read_tells_how_fast_its_path_is(n_readers: int) -> None:
    core = Core("decode-0", "kvstore-0", "kvstore-1", prior_bandwidth=1e6, placement="min_ttft")
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
    n_bytes = 5 * LAYOUT.block_bytes
    assert core.chosen.transfer_s == pytest.approx(n_bytes / seen * n_readers)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [["decode-0"], ["prefill-0"], [], ["kvstore-0"]])
def test_without_a_prefill_or_a_decode_worker_a_request_is_unavailable(present: list[str]) -> None:
    reject = only(Core(*present).arrive(), Reject)
    assert (reject.kind, reject.retry_after_s) == ("unavailable", 1.0)


def test_a_request_goes_to_workers_with_the_features_it_needs_or_is_refused_by_name() -> None:
    core = Core()
    for name in ("prefill-0", "decode-0"):
        core.join(name, features=("sampling",))
    core.join("prefill-1", features=("logprobs", "sampling", "a feature of a later version"))
    sampling = Sampling(temperature=0.0, logprobs=1)
    reject = only(core.arrive(a_request("refused", sampling=sampling)), Reject)
    assert reject.kind == "unsupported"
    assert "no decode worker of this cluster has logprobs" in reject.reason
    assert core.conductor.refusals == {"unsupported": 1}
    core.join("decode-1", features=("logprobs", "sampling"))
    for i in range(8):
        assert asked(core.arrive(a_request(f"cmpl-{i}", sampling=sampling))) == {f"cmpl-{i}": D1}
        core.reserved("decode-1", f"cmpl-{i}")
        assert core.conductor.prefill_of(RequestId(f"cmpl-{i}")) == "prefill-1"
    # Plain requests go to workers of both kinds.
    assert asked(core.arrive("plain", n_tokens=40)) == {"plain": D0}


@pytest.mark.parametrize("features", [None, ()])
def test_the_end_of_a_try_is_said_once_but_to_workers_of_before(
    features: tuple[str, ...] | None,
) -> None:
    core = Core("prefill-0")
    core.join("decode-0", features=features)
    reserve = message_to(core.arrive(), D0)
    assert reserve.stopping.max_new_tokens == 8
    core.reserved()
    start = message_to(core.prefilled(), D0)
    assert start.stopping == (reserve.stopping if features is None else None)


def test_a_worker_that_drains_finishes_what_it_has() -> None:
    core = a_pair()
    core.arrive()
    assert core.join("decode-0", draining=True) == []
    assert sent(core.reserved()) == [(P0, StartPrefill)]
    assert sent(core.prefilled()) == [(D0, StartDecode)]


@pytest.mark.parametrize(
    ("n_blocks", "n_tokens", "max_new", "reason"),
    [
        (64, 4090, 7, "4090 tokens and up to 7 new ones are 4097.* 4096 tokens"),
        (0, 1020, 8, "need 65 pages of 16 tokens; the largest decode worker has 64"),
        (2, 40, 8, "the largest prefill worker has 2"),
    ],
    ids=["over the context", "over every decode pool", "over every prefill pool"],
)
def test_a_prompt_that_nothing_can_hold_is_too_long_with_both_numbers(
    n_blocks: int, n_tokens: int, max_new: int, reason: str
) -> None:
    core = a_pair()
    core.join("prefill-0", n_blocks=n_blocks)
    reject = only(core.arrive(n_tokens=n_tokens, max_new_tokens=max_new), Reject)
    assert reject.kind == "too_long"
    assert re.search(reason, reject.reason)


def test_a_long_prompt_goes_to_the_worker_that_can_hold_it() -> None:
    core = a_pair()
    core.join("prefill-0", n_blocks=0)
    core.join("decode-1", n_blocks=256, decode_cost=DecodeCost(d0_s=9.0))
    assert asked(core.arrive("full", n_tokens=1017, max_new_tokens=8)) == {"full": D0}
    assert asked(core.arrive(n_tokens=2000)) == {R1: D1}


def test_a_predicted_miss_is_refused_before_anything_is_spent_but_for_a_retry() -> None:
    core = Core("decode-0", admission="early", ttft_slo_s=15.0)
    core.join("prefill-0", prefill_cost=SLOW)
    assert asked(core.arrive("cmpl-1"))
    reject = only(core.arrive("cmpl-2"), Reject)
    assert (reject.kind, reject.retry_after_s) == ("overloaded", 5.0)
    assert asked(core.arrive("cmpl-3", ttft_slo_s=20.0))
    assert asked(core.arrive("cmpl-4~2", attempt=2))


# -- decode pools full -------------------------------------------------------------------------


def test_who_waits_is_served_when_a_load_shows_room() -> None:
    core = a_pair()
    core.arrive(n_tokens=40, max_new_tokens=30)  # three pages, and one to grow into
    core.refused()
    assert core.load(free_pages=3) == []
    assert asked(core.load(free_pages=4)) == {R1: D0}


def test_nobody_overtakes_those_who_wait_until_a_request_finishes() -> None:
    core = decoding(n_tokens=900)
    assert core.arrive("cmpl-2", n_tokens=400) == core.arrive("cmpl-3", n_tokens=16) == []
    assert core.n_requests == {"decoding": 1, "waiting": 2}
    assert list(asked(core.finish())) == ["cmpl-2", "cmpl-3"]


def test_who_was_refused_waits_in_front_of_those_who_came_later() -> None:
    core = a_pair()
    core.arrive("cmpl-1")
    core.load(free_pages=0)
    core.arrive("cmpl-2")
    core.refused(rid="cmpl-1")
    assert list(asked(core.load(free_pages=64))) == ["cmpl-1", "cmpl-2"]


def test_a_full_line_refuses_new_requests_but_not_retries() -> None:
    core = a_pair(max_waiting=1)
    core.load(free_pages=0)
    core.arrive("cmpl-1")
    reject = only(core.arrive("cmpl-2"), Reject)
    assert reject.kind == "overloaded"
    assert "1 requests wait" in reject.reason
    assert core.arrive("cmpl-3~2", attempt=2) == []
    assert core.n_requests == {"waiting": 2}


def test_waiting_ends_with_the_slo_or_the_timeout() -> None:
    core = a_pair(admission="early", request_timeout_s=100.0)
    core.load(free_pages=0)
    core.arrive("cmpl-1", ttft_slo_s=5.0)
    core.arrive("cmpl-2")
    core.arrive("cmpl-3~2", attempt=2)
    core.load(free_pages=0)
    reject = only(core.tick(5.0), Reject)
    assert (reject.request_id, reject.kind) == (R1, "overloaded")
    rejects = core.tick(100.0)
    assert [(r.request_id, r.kind) for r in rejects if isinstance(r, Reject)] == [
        (R2, "overloaded"),
        ("cmpl-3~2", "overloaded"),
    ]


def test_without_admission_nobody_is_refused_for_a_limit_while_waiting() -> None:
    core = a_pair(ttft_slo_s=5.0, request_timeout_s=100.0)
    core.now = 100.0
    core.load(free_pages=0)
    core.arrive()
    core.load(free_pages=0)
    assert core.tick(199.0) == []
    core.load(free_pages=0)
    assert only(core.tick(200.0), Reject).reason == "no decode pages came free in 100 s"


def test_who_waited_in_vain_hears_why_and_when_to_come_back() -> None:
    core = a_pair(request_timeout_s=100.0)
    core.run()
    core.now = 40.0
    core.finish()
    core.run("cmpl-3")
    core.arrive("cmpl-2")
    core.load(free_pages=0)
    core.refused(rid="cmpl-2")
    reject = only(core.tick(140.0), Reject)
    assert reject.reason == "no decode worker had room for 100 s; decode-0: 0 of 64 pages are free"
    assert reject.retry_after_s > 30


def test_who_waits_hears_when_nobody_is_left() -> None:
    core = a_pair()
    core.load(free_pages=0)
    core.arrive()
    assert core.lose("decode-0") == []
    core.now = 9.9
    assert core.arrive("cmpl-2") == core.tick() == []
    why = "no decode worker is live that takes requests"
    rejects = core.tick(10.0)
    assert [(r.request_id, r.kind, r.reason) for r in rejects if isinstance(r, Reject)] == [
        (rid, "unavailable", why) for rid in (R1, R2)
    ]
    assert only(core.arrive("cmpl-3"), Reject).kind == "unavailable"


@pytest.mark.parametrize("lost", [("decode-0",), ("prefill-0",), ("prefill-0", "decode-0")])
def test_requests_wait_for_workers_that_come_back(lost: tuple[str, ...]) -> None:
    core = a_pair()
    core.arrive()
    assert [rid for name in lost for rid in resubmitted(core.lose(name))] == [R1]
    assert core.arrive("cmpl-1~2", attempt=2) == core.arrive("cmpl-2") == []
    core.now = 8.0
    commands = [c for name in lost for c in core.join(name)]
    assert asked(commands) == {"cmpl-1~2": D0, "cmpl-2": D0}


def test_a_draining_worker_gets_nothing_new_and_none_waits_for_it_when_it_has_gone() -> None:
    core = a_pair()
    core.join("decode-0", draining=True)
    assert only(core.arrive(), Reject).kind == "unavailable"
    core.lose("decode-0")
    assert only(core.arrive(), Reject).kind == "unavailable"


def test_requests_that_wait_end_when_another_model_comes() -> None:
    core = a_pair()
    for name in ("prefill-0", "decode-0"):
        core.lose(name)
    assert core.arrive() == []
    other = msgspec.structs.replace(LAYOUT, n_layers=LAYOUT.n_layers + 1)
    reject = only(core.join("decode-1", layout=other), Reject)
    assert (reject.request_id, reject.kind) == (R1, "unavailable")
    assert core.conductor.cluster.layout == other
    assert core.n_requests == {}


@pytest.mark.parametrize(
    ("code", "kind"),
    [("", Reject), ("too_long", Reject), ("invalid", Fail), ("layout_mismatch", Fail)],
)
def test_a_refusal_for_ever_is_too_long_unless_it_is_for_another_reason(
    code: str, kind: type
) -> None:
    core = a_pair()
    for rid, attempt in (("cmpl-1", 1), ("cmpl-2~2", 2)):
        core.arrive(rid, attempt=attempt)
        ended: Any = only(core.refused(rid=rid, retryable=False, code=code), kind)
        assert getattr(ended, "kind", "too_long") == "too_long"
        assert "0 of 64 pages" in ended.reason


def test_a_decode_worker_that_does_not_answer_is_left_for_another() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    core.arrive()
    assert core.tick(4.9) == []
    assert sent(core.tick(5.0)) == [(D0, Cancel), (D1, ReserveDecode)]
    # Its late answer frees what it holds.
    assert core.reserved("decode-0") == [FREED]
    assert sent(core.reserved("decode-1")) == [(P0, StartPrefill)]


def test_a_silent_decode_worker_gets_nothing_new_for_as_long_as_it_was_waited_for() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    core.arrive()
    core.tick(5.0)  # now it is at decode-1, which makes decode-0 the idle one
    core.now = 9.9
    assert asked(core.arrive("cmpl-2")) == {R2: D1}
    core.now = 10.0
    assert asked(core.arrive("cmpl-3")) == {"cmpl-3": D0}


def test_a_silent_decode_worker_is_asked_again_only_under_another_id() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    core.arrive()
    core.tick(5.0)
    core.refused("decode-1")
    assert core.load("decode-0") == []
    assert core.phase() is Phase.WAITING
    assert core.lose("decode-1") == [Resubmit(R1, "no answer from decode-0")]
    core.load("decode-0")
    assert asked(core.arrive("cmpl-1~2", attempt=2)) == {"cmpl-1~2": D0}


def test_when_all_but_an_avoided_decode_worker_are_silent_another_try_is_made() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", reserve_timeout_s=5.0)
    start_prefill(core)
    core.prefill_failed(culprit=D0)
    again = retry_id(R1, 2)
    assert asked(core.arrive(again, attempt=2)) == {again: D1}
    # It would wait for ever, with all others behind it: only decode-1 could let it go on.
    assert core.tick(5.0) == [
        Send(D1, Cancel(request_id=again)),
        Resubmit(again, "no answer from decode-1"),
    ]
    assert asked(core.arrive("cmpl-2")) == {R2: D0}


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("retryable", [True, False])
def test_a_failed_prefill_frees_the_landing_and_is_tried_again_if_it_may_succeed(
    retryable: bool,
) -> None:
    core = prefilling()
    ended = Resubmit if retryable else Fail
    why = "prefill at prefill-0 failed: out of memory"
    assert core.prefill_failed(retryable=retryable) == [FREED, ended(R1, why)]
    assert core.n_requests == {}


def test_after_the_last_try_without_a_token_it_fails() -> None:
    core = a_pair(max_attempts=2)
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    fail = core.lose("decode-0")[-1]
    assert isinstance(fail, Fail)
    assert "(2 tries in a row brought no token)" in fail.reason


def test_a_try_that_delivered_tokens_is_not_counted_however_many_there_were() -> None:
    core = a_pair(max_attempts=1)
    core.run("cmpl-1~9", attempt=9, fruitless=1)
    assert resubmitted(core.decode_failed(rid="cmpl-1~9")) == ["cmpl-1~9"]


@pytest.mark.parametrize("culprit", [D0, None])
def test_the_next_try_goes_to_other_workers_if_there_are_any(culprit: Any) -> None:
    core = Core("prefill-0", "prefill-1", "decode-0", "decode-1")
    start_prefill(core)
    core.prefill_failed(culprit=culprit)
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    assert (core.placement.prefill, core.placement.decode) == ((P0, D1) if culprit else (P1, D0))
    core.lose("decode-1" if culprit else "prefill-1")
    core.arrive("cmpl-1~3", attempt=3, fruitless=2)
    assert (core.placement.prefill, core.placement.decode) == (P0, D0)


def fail_at_prefill_0(core: Core, rid: str) -> None:
    core.arrive(rid)
    assert sent(core.reserved(rid=rid)) == [(P0, StartPrefill)]
    core.prefill_failed(rid=rid)


@pytest.mark.parametrize(
    "way", ["finished", "at its first token", "cancelled", "failed", "too long"]
)
def test_where_a_request_failed_is_forgotten_when_it_is_over(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so many are remembered: what is over may not push out what is not."""
    monkeypatch.setattr(placer, "MAX_AVOIDED", 2)
    core = Core("prefill-0", "prefill-1", "decode-0")
    fail_at_prefill_0(core, "cmpl-1")
    fail_at_prefill_0(core, "cmpl-2")
    again = "cmpl-2~2"
    core.arrive(again, attempt=2, fruitless=1)
    if way == "cancelled":
        core.cancel(again)
    elif way == "too long":
        core.refused(rid=again, retryable=False)
    else:
        core.reserved(rid=again)
    if way == "failed":
        core.prefill_failed("prefill-1", again, retryable=False)
    elif way in ("finished", "at its first token"):
        core.prefilled("prefill-1", again, finish="" if way == "finished" else "stop")
        core.finish(again)
    assert core.n_requests == {}
    fail_at_prefill_0(core, "cmpl-3")
    core.arrive("cmpl-1~2", attempt=2, fruitless=1)
    assert core.placement.prefill == P1


def test_of_too_many_requests_that_failed_the_one_of_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placer, "MAX_AVOIDED", 1)
    core = Core("prefill-0", "prefill-1", "decode-0")
    for rid in ("cmpl-1", "cmpl-2"):
        fail_at_prefill_0(core, rid)
    for rid, prefill in (("cmpl-1~2", P0), ("cmpl-2~2", P1)):
        core.arrive(rid, attempt=2, fruitless=1)
        assert core.placement.prefill == prefill
        core.cancel(rid)


def test_a_landing_that_ran_out_stops_its_prefill() -> None:
    cancel, again = prefilling().decode_failed(reason="the landing ran out")
    assert cancel == STOPPED
    assert isinstance(again, Resubmit)
    only(decoding().decode_failed(), Resubmit)  # of one that decodes there is none to stop


def test_a_lost_decode_worker_stops_prefill_and_the_request_is_tried_again() -> None:
    core = prefilling()
    assert core.lose("decode-0") == [STOPPED, Resubmit(R1, "decode-0 is lost: socket closed")]
    assert core.n_requests == {}


def test_a_lost_prefill_worker_leaves_the_landing_in_doubt() -> None:
    cancel, again = prefilling().lose("prefill-0")
    assert cancel == IN_DOUBT
    assert isinstance(again, Resubmit)


def test_a_prefill_worker_lost_before_or_after_its_prefill_leaves_no_doubt() -> None:
    core = a_pair()
    core.arrive()
    assert core.lose("prefill-0")[0] == FREED
    core = decoding()
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
    core = prefilling(request_timeout_s=100.0)
    given_up = Resubmit(R1, "prefill-0 did not finish in 100 s", Casualty(P0, 1))
    assert core.tick(100.0) == [STOPPED, given_up]
    assert core.n_requests == {"stopping": 1}


def test_a_kvstore_that_could_not_be_reached_is_forgotten_and_not_used_again() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0")
    request = a_request(n_tokens=100)
    core.hold("kvstore-0", request, 5)
    assert start_prefill(core, n_tokens=100).cached is not None
    assert ASK_BLOCKS in core.prefill_failed(culprit=K0)
    assert len(core.conductor.index) == 0
    core.hold("kvstore-0", request, 5)
    core.arrive("cmpl-1~2", n_tokens=100, attempt=2)
    start = message_to(core.reserved(rid="cmpl-1~2"), P0)
    assert (start.cached, start.store_in) == (None, None)
    core.arrive("cmpl-2", n_tokens=100)
    assert message_to(core.reserved(rid="cmpl-2"), P0).cached is not None


def test_a_client_gone_leaves_the_line_or_frees_the_pages_that_it_was_to_get_or_had() -> None:
    core = a_pair()
    core.load(free_pages=0)
    core.arrive()
    assert core.cancel() == []
    assert core.n_requests == {}
    core = a_pair()
    core.arrive()
    assert core.cancel() == core.reserved() == [FREED]  # also if they are granted late
    core = decoding()
    assert core.cancel() == [FREED]
    assert core.n_requests == {}


# -- clients that go -----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["prefill_stopped", "prefilled", "prefill_failed"])
def test_the_landing_of_a_client_gone_is_freed_once_prefill_writes_no_more(answer: str) -> None:
    core = prefilling()
    assert core.cancel() == [STOPPED]
    assert core.n_requests == {"stopping": 1}
    assert core.reserved() == core.arrive() == []  # nor is it taken again under its id
    assert getattr(core, answer)() == [FREED]
    assert core.n_requests == {}
    assert core.prefill_stopped() == []


def test_a_prefill_that_does_not_say_that_it_stopped_leaves_the_landing_in_doubt() -> None:
    core = prefilling(reserve_timeout_s=5.0)
    core.cancel()
    assert core.tick(5.0) == [IN_DOUBT]
    core = prefilling()
    core.cancel()
    assert core.lose("prefill-0") == [IN_DOUBT]


@pytest.mark.parametrize("in_doubt", [False, True])
@pytest.mark.parametrize("answer", ["stopped", "failed while it was stopped", "failed"])
def test_decode_is_told_whether_a_prefill_that_ended_leaves_the_landing_in_doubt(
    answer: str, in_doubt: bool
) -> None:
    core = prefilling()
    if answer != "failed":
        core.cancel()
    end = core.prefill_stopped if answer == "stopped" else core.prefill_failed
    cancels = [c for c in end(landing_in_doubt=in_doubt) if isinstance(c, Send)]
    assert cancels == [IN_DOUBT if in_doubt else FREED]


def test_a_landing_that_decode_let_go_is_not_freed_again_when_prefill_stops() -> None:
    core = prefilling()
    core.cancel()
    assert core.decode_failed(reason="the landing ran out") == []
    assert core.n_requests == {}
    assert core.prefill_stopped() == []


# -- late and doubled messages -------------------------------------------------------------------


def test_answers_said_twice_are_heard_once() -> None:
    core = a_pair()
    core.arrive()
    assert core.arrive() == []
    core.reserved()
    assert core.reserved() == []
    core.prefilled()
    assert core.prefilled() == core.reserved() == []


def test_answers_from_the_wrong_worker_are_ignored() -> None:
    core = Core("prefill-0", "prefill-1", "decode-0", "decode-1")
    start_prefill(core)
    assert core.prefilled("prefill-1") == core.decode_failed("decode-1") == []
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
    core = a_pair()
    core.lose("decode-0")
    assert core.reserved() == core.lose("decode-0") == []


# -- workers -----------------------------------------------------------------------------------


UNFIT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "block_size is 16 at the cluster, 32 at decode-0": ("", "decode-0", {"block_size": 32}),
    "dtype is 'float32' at the cluster, 'bfloat16' at": ("", "decode-0", {"dtype": "bfloat16"}),
    "states no KV layout": ("", "decode-0", {"layout": None}),
    "model is 'tiny-chat' at the cluster, 'large-chat'": ("", "decode-0", {"model": "large-chat"}),
    "block_size is 32 by the conductor's settings, 16 at": ("settings", "prefill-0", {}),
    "block_size is 8, allowed are 16 to 512 tokens, at": ("first", "prefill-0", {"block_size": 8}),
}


@pytest.mark.parametrize(("reason", "case"), UNFIT.items(), ids=UNFIT)
def test_a_worker_that_does_not_fit_is_refused_with_both_values(reason: str, case: Any) -> None:
    how, name, fields = case
    core = Core(block_size=32) if how == "settings" else Core()
    if not how:
        core.join("prefill-0")
    if not fields.keys() & {"model", "layout"}:
        fields = {"layout": msgspec.structs.replace(LAYOUT, **fields)}
    refuse = only(core.join(name, **fields), RefuseWorker)
    assert refuse.worker_id == name and reason in refuse.reason
    assert core.conductor.cluster.get(name) is None


def test_a_worker_that_changes_its_layout_is_lost_and_refused() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32)
    again, refuse = decoding().join("decode-0", layout=other)
    assert isinstance(again, Resubmit)
    assert isinstance(refuse, RefuseWorker)


def test_a_worker_started_again_has_lost_what_it_had() -> None:
    core = decoding()
    again = only(core.join("decode-0", generation=2), Resubmit)
    assert again.reason == "decode-0 is lost: it was started again"
    assert asked(core.arrive("cmpl-2")) == {R2: D0}


def test_a_kvstore_started_again_is_asked_what_it_holds_now() -> None:
    core = Core("prefill-0")
    assert core.join("kvstore-0", layout=None) == [ASK_BLOCKS], "it needs no layout"
    core.hold("kvstore-0", a_request(), 2)
    assert core.join("kvstore-0", generation=2) == [ASK_BLOCKS]
    assert len(core.conductor.index) == 0


def test_late_word_of_an_earlier_start_is_ignored() -> None:
    core = Core("prefill-0")
    core.join("decode-0", generation=2)
    core.run()
    assert core.join("decode-0", generation=1) == []
    assert core.phase() is Phase.DECODING


def test_a_changed_record_loses_no_request() -> None:
    core = Core("prefill-0", "decode-0", "kvstore-0")
    core.hold("kvstore-0", a_request(), 2)
    core.run()
    assert core.hear("decode-0", Welcome(worker=a_worker("decode-0", n_blocks=99))) == []
    assert core.join("kvstore-0") == []
    assert core.phase() is Phase.DECODING
    assert len(core.conductor.index) == 2


def test_a_gap_in_a_kvstores_events_asks_for_a_snapshot_again_until_it_comes() -> None:
    core = Core("kvstore-0", snapshot_timeout_s=5.0)
    core.hold("kvstore-0", a_request(), 0)
    hashes = a_request().block_hashes
    assert core.handle(KvChanged(K0, kv_stored(hashes, 3)), 1.0) == [ASK_BLOCKS]
    assert core.tick(5.9) == []
    assert core.tick(6.0) == [ASK_BLOCKS]
    core.hear("kvstore-0", BlocksSnapshot(sequence=2, hashes=()))
    assert len(core.conductor.index) == len(hashes)
    assert core.tick(60.0) == []


# -- what the metrics show -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "ttft_s", "tbt_s"),
    [({"ttft_slo_s": 40.0, "tbt_slo_s": 0.5}, 40.0, 0.5), ({}, 1.0, 1.0)],
    ids=["over the limits", "in seconds without limits"],
)
def test_loads_are_the_pools_means(limits: dict[str, float], ttft_s: float, tbt_s: float) -> None:
    core = Core(admission="none", **limits)
    assert core.conductor.loads(0.0) == (0.0, 0.0)
    for name in ("prefill-0", "prefill-1"):
        core.join(name, prefill_cost=SLOW)
    for name in ("decode-0", "decode-1"):
        core.join(name, decode_cost=DecodeCost(d0_s=0.1, d1_s=0.1, d2_s=0.0))
    assert core.conductor.loads(0.0) == (0.0, 0.0)
    core.arrive()
    assert core.conductor.loads(4.0) == pytest.approx((6.0 / 2 / ttft_s, 0.0))
    core.reserved()
    core.prefilled()
    assert core.conductor.loads(4.0) == pytest.approx((0.0, 0.2 / 2 / tbt_s))


def test_first_tokens_and_steps_are_compared_with_what_was_predicted() -> None:
    core = Core()
    core.join("prefill-0", prefill_cost=SLOW)
    core.join("decode-0", decode_cost=DecodeCost(d0_s=0.1, d1_s=0.0, d2_s=0.0))
    core.now = 100.0
    start_prefill(core)
    assert core.conductor.prefill_of(R1) == P0
    core.now = 120.0
    core.prefilled()
    core.now = 121.2
    core.finish(n_new=5)
    assert core.conductor.prefill_of(R1) is None
    ttft, tbt = (core.conductor.prediction_errors.histograms[name] for name in ("ttft", "tbt"))
    assert (ttft.n, ttft.predicted_s, ttft.observed_s) == (1, 10.0, 20.0)
    assert (tbt.n, tbt.predicted_s) == (1, 0.1)
    assert tbt.observed_s == pytest.approx(1.2 / 4)
    assert ttft.ratio_sum == 2.0


def test_a_single_token_has_no_steps_to_compare() -> None:
    core = a_pair()
    for n_new, n_compared in ((1, 0), (2, 1)):
        core.run(f"cmpl-{n_new}")
        core.now += 1.0
        assert core.finish(f"cmpl-{n_new}", n_new) == []
        assert core.conductor.prediction_errors.histograms["tbt"].n == n_compared


# -- answers that are kept -----------------------------------------------------------------------


ROOT = root_hash(model=LAYOUT.model, salt="lab", block_size=LAYOUT.block_size)


@pytest.mark.parametrize("n_blocks", [2, 0])
def test_decode_is_told_where_the_chain_of_the_prompt_continues(n_blocks: int) -> None:
    n_tokens = n_blocks * LAYOUT.block_size + 5
    request = a_request(n_tokens=n_tokens, tenant="lab", cache_salt="lab")
    core = Core("prefill-0", "kvstore-0")
    core.join("decode-0", keeps_answers=True)
    chain = message_to(core.run(request), D0).answer_chain
    assert chain.store_in == core.conductor.cluster.address(K0)
    assert (chain.parent, chain.tenant) == ([ROOT, *request.block_hashes][n_blocks], "lab")
    assert chain.tail == request.token_ids[-5:]


@pytest.mark.parametrize("lacking", ["no will", "no kvstore", "a lost one", "a restarted one"])
def test_decode_is_told_nothing_of_answers_that_can_not_be_kept(lacking: str) -> None:
    core = Core("prefill-0") if lacking == "no kvstore" else Core("prefill-0", "kvstore-0")
    core.join("decode-0", keeps_answers=lacking != "no will")
    core.arrive()
    core.reserved()
    if lacking in ("a lost one", "a restarted one"):
        core.lose("kvstore-0")
    if lacking == "a restarted one":
        core.join("kvstore-0", generation=7)
    assert message_to(core.prefilled(), D0).answer_chain is None
