"""What operators see of the cluster: workers, hot prefixes, latencies; who left, and who is new."""

from typing import Any

import msgspec
import pytest

from halfmoon_conductor.observability.history.latency_history import (
    KEPT_SECONDS,
    MAX_SAMPLES,
    LatencyHistory,
)
from halfmoon_conductor.observability.history.prefix_usage import MAX_PREFIXES, PrefixUseCounter
from halfmoon_conductor.observability.history.request_history import RequestHistory
from halfmoon_conductor.observability.history.worker_history import (
    DEPARTED_KEPT_S,
    MAX_DEPARTED,
    WorkerHistory,
)
from halfmoon_conductor.page.cluster_view import ConductorInfo, cluster_view
from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    DecodeLoad,
    KvstoreLoad,
    PrefillCost,
    PrefillLoad,
)
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.events import (
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import LAYOUT, a_request, a_worker
from tests.conductor.watched_core import WatchedCore

HASHES = a_request().block_hashes
SNAPSHOT = BlocksSnapshot(sequence=0, hashes=HASHES)
EMPTY: dict[str, Any] = {"n_reserved": 0, "context_tokens": 0, "n_pages": 64, "step_s": 0.03}


class Watched(WatchedCore):
    """A core with the view of its cluster."""

    def join(self, *names: str, **more: Any) -> None:
        for name in names:
            cost = PrefillCost(c0_s=0.0, c1_s=0.01) if name.startswith("prefill") else None
            super().join(name, prefill_cost=cost, **more)

    def view(self) -> dict[str, Any]:
        conductor = ConductorInfo("conductor-0", "redis")
        seen = cluster_view(self.observer, self.links, conductor, self.now)
        view: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(seen, enc_hook=str))
        return view

    def worker(self, name: str) -> dict[str, Any]:
        (found,) = [w for w in self.view()["workers"] if w["worker_id"] == name]
        assert isinstance(found, dict)
        return found

    def lose(self, name: str, reason: str) -> None:
        self.handle(WorkerLost(WorkerId(name), reason))


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    watched.join("kvstore-0", "prefill-0", "decode-0")
    return watched


def test_a_prefill_worker_shows_its_queue_as_it_says_and_as_it_is_predicted(
    watched: Watched,
) -> None:
    watched.handle(RequestArrived(a_request("cmpl-1")))
    watched.hear("prefill-0", PrefillLoad(n_queued=1, queued_tokens=40, free_pages=60, n_pages=64))
    watched.now += 0.1
    seen = watched.worker("prefill-0")
    assert seen["home"] == "kvstore-0"
    assert seen["heard_s_ago"] == pytest.approx(0.1)
    load = seen["load"]
    assert (load["n_requests"], load["n_queued"], load["queued_tokens"]) == (1, 1, 40)
    assert load["queue_s"] == pytest.approx(40 * 0.01 - 0.1)
    assert (load["free_pages"], load["n_pages"]) == (60, 64)


def test_a_decode_worker_shows_what_runs_and_what_a_step_takes(watched: Watched) -> None:
    watched.serve("cmpl-1")
    running = {**EMPTY, "n_reserved": 2, "context_tokens": 41}
    watched.hear("decode-0", DecodeLoad(n_running=1, free_pages=61, **running))
    seen = watched.worker("decode-0")["load"]
    assert (seen["n_running"], seen["n_reserved"], seen["step_s"]) == (1, 2, 0.03)
    assert (seen["free_pages"], seen["n_pages"], seen["n_requests"]) == (61, 64, 1)
    assert seen["tbt_s"] > 0
    watched.handle(RequestFinished(RequestId("cmpl-1"), 2))
    watched.hear("decode-0", DecodeLoad(n_running=0, free_pages=64, **EMPTY))
    assert watched.worker("decode-0")["load"]["tbt_s"] == 0


def test_a_kvstore_shows_both_tiers_and_what_it_was_asked_for(watched: Watched) -> None:
    watched.hear("kvstore-0", SNAPSHOT)
    load = KvstoreLoad(
        n_stored=2, n_reserved=1, n_leased=1, n_blocks=64, n_disk_stored=9, n_disk_blocks=99,
        n_found_in_memory=7, n_found_on_disk=2, n_missing=1,
    )  # fmt: skip
    watched.hear("kvstore-0", load)
    seen = watched.worker("kvstore-0")["load"]
    assert seen == {
        "n_readers": 0,
        "n_indexed": len(HASHES),
        "memory": {"n_stored": 2, "n_reserved": 1, "n_leased": 1, "n_blocks": 64},
        "disk": {"n_stored": 9, "n_blocks": 99},
        "lookups": {"memory": 7, "disk": 2, "missing": 1},
    }


def test_who_left_is_shown_with_the_reason_until_it_is_back(watched: Watched) -> None:
    watched.lose("decode-0", "its lease is over")
    watched.now += 3
    view = watched.view()
    assert [w["worker_id"] for w in view["workers"]] == ["kvstore-0", "prefill-0"]
    (gone,) = view["gone"]
    assert (gone["worker_id"], gone["role"], gone["reason"], gone["s_ago"]) == (
        "decode-0", "decode", "its lease is over", 3.0,
    )  # fmt: skip
    watched.join("decode-0", generation=2)
    assert watched.view()["gone"] == []
    watched.lose("decode-0", "again")
    watched.now += DEPARTED_KEPT_S
    assert watched.view()["gone"] == []


def test_a_worker_that_the_core_refuses_is_not_shown_as_live(watched: Watched) -> None:
    watched.join("decode-0", generation=2, layout=None)
    (gone,) = watched.view()["gone"]
    assert "states no KV layout" in gone["reason"]


def test_the_workers_that_are_remembered_are_bounded_and_strangers_are_not_among_them() -> None:
    seen = WorkerHistory()
    for n in range(MAX_DEPARTED + 5):
        seen.on_joined(a_worker(f"decode-{n}"), 0.0)
        seen.on_left(WorkerId(f"decode-{n}"), "gone", 0.0)
    assert len(seen.departed(1.0)) == MAX_DEPARTED
    assert seen.departed(1.0)[0].info.worker_id == f"decode-{MAX_DEPARTED + 4}"
    stranger = WorkerId("decode-x")
    seen.on_report(stranger, None, 1.0)
    seen.on_left(stranger, "gone", 1.0)
    assert seen.last_report(stranger) is None
    assert stranger not in [gone.info.worker_id for gone in seen.departed(1.0)]


def test_what_was_heard_of_an_earlier_start_is_forgotten(watched: Watched) -> None:
    load = PrefillLoad(n_queued=3, queued_tokens=40, free_pages=6, n_pages=64)
    watched.hear("prefill-0", load)
    watched.join("prefill-0", generation=2)
    assert watched.worker("prefill-0")["load"]["n_queued"] == 0


def test_a_hot_prefix_is_shown_with_those_who_hold_it(watched: Watched) -> None:
    watched.join("kvstore-1")
    watched.serve("cmpl-1")
    assert watched.view()["hot_prefixes"] == []
    for kvstore in ("kvstore-0", "kvstore-1"):
        watched.hear(kvstore, SNAPSHOT)
    watched.serve("cmpl-2", n_cached=32)
    watched.serve("cmpl-3", n_cached=32)
    (hot,) = watched.view()["hot_prefixes"]
    assert hot == {
        "prefix": HASHES[-1].hex(),
        "n_blocks": 2,
        "n_tokens": 2 * LAYOUT.block_size,
        "uses": 2.0,
        "last_request_id": "cmpl-3",
        "holders": ["kvstore-0", "kvstore-1"],
    }


def test_a_copy_of_a_hot_prefix_is_shown_while_it_is_under_way() -> None:
    watched = Watched(replication_bytes_per_s=1e9, replication_hot_uses=2.0)
    watched.join("prefill-0", "decode-0")
    watched.join("kvstore-0", "kvstore-1", replicates=True)
    watched.hear("kvstore-0", SNAPSHOT)
    watched.hear("kvstore-1", BlocksSnapshot(sequence=0, hashes=()))
    for name in ("cmpl-1", "cmpl-2", "cmpl-3"):
        watched.serve(name, n_cached=32)
    assert watched.view()["copies"] == []
    watched.now += 5.0
    watched.handle(Tick())
    (copy,) = watched.view()["copies"]
    copied = {"prefix": HASHES[-1].hex(), "n_blocks": 2, "source": "kvstore-0"}
    assert copy == {**copied, "target": "kvstore-1"}


def test_reuse_is_counted_over_all_prompts_and_for_each(watched: Watched) -> None:
    watched.serve("cmpl-1")
    watched.hear("kvstore-0", SNAPSHOT)
    watched.serve("cmpl-2", n_cached=32)
    assert watched.view()["reuse"] == {
        "n_prompts": 2, "n_tokens": 80, "n_cached": 32, "n_transferred": 0,
    }  # fmt: skip
    course = watched.observer.requests.get(RequestId("cmpl-2"))
    assert course is not None
    assert (course.n_cached, course.fetched_from) == (32, "kvstore-0")


def test_blocks_that_came_over_from_another_kvstore_are_told_apart(watched: Watched) -> None:
    watched.join("kvstore-1")
    home = watched.worker("prefill-0")["home"]
    other = {"kvstore-0": "kvstore-1", "kvstore-1": "kvstore-0"}[home]
    watched.hear(other, SNAPSHOT)
    watched.serve("cmpl-1", n_cached=32)
    assert watched.view()["reuse"]["n_transferred"] == 32


def test_the_revision_moves_when_a_request_does_and_rests_when_none_does(
    watched: Watched,
) -> None:
    seen = [watched.view()["revision"]]
    watched.serve("cmpl-1")
    seen.append(watched.view()["revision"])
    watched.handle(RequestCancelled(RequestId("cmpl-1")))
    seen.append(watched.view()["revision"])
    assert seen == sorted(set(seen))
    watched.handle(RequestCancelled(RequestId("cmpl-1")))
    watched.join("decode-1")
    assert watched.view()["revision"] == seen[-1]


def test_the_tries_that_are_remembered_are_bounded() -> None:
    seen = RequestHistory(kept=3)
    for n in range(5):
        seen.on_arrival(a_request(f"cmpl-{n}"), 0.0)
    assert seen.get(RequestId("cmpl-1")) is None
    assert seen.get(RequestId("cmpl-2")) is not None


# -- hot prefixes --------------------------------------------------------------------------------


def blocks(name: str, n: int) -> list[BlockHash]:
    return [BlockHash(f"{name}-{i}".encode()) for i in range(n)]


def test_what_all_conversations_begin_with_is_hotter_than_each_of_them() -> None:
    uses, system = PrefixUseCounter(half_life_s=60.0), blocks("system", 4)
    for turn in range(2):
        for name in ("a", "b", "c"):
            own = blocks(name, 3) if turn else []
            uses.on_use([*system, *own], RequestId(f"cmpl-{name}"), 0.0)
    top, *rest = uses.hottest(10, 0.0)
    assert (top.block, top.n_blocks, top.uses) == (system[-1], 4, 6.0)
    assert {(p.block, p.n_blocks, p.uses) for p in rest} == {
        (blocks(name, 3)[-1], 7, 1.0) for name in "abc"
    }


def test_of_prefixes_that_are_used_together_the_longest_one_is_shown() -> None:
    uses, prompt = PrefixUseCounter(half_life_s=60.0), blocks("prompt", 8)
    uses.on_use(prompt[:4], RequestId("cmpl-1"), 0.0)
    for n in range(20):
        uses.on_use(prompt, RequestId(f"cmpl-{n}"), 0.0)
    assert [(p.n_blocks, p.uses) for p in uses.hottest(10, 0.0)] == [(8, 20.0)]


def test_uses_fade_and_a_prefix_that_cooled_is_not_shown() -> None:
    uses = PrefixUseCounter(half_life_s=60.0)
    uses.on_use(blocks("old", 2), RequestId("cmpl-1"), 0.0)
    assert [p.uses for p in uses.hottest(10, 60.0)] == [0.5]
    assert uses.hottest(10, 61.0) == []


def test_prefixes_that_are_counted_are_bounded() -> None:
    uses = PrefixUseCounter(half_life_s=60.0)
    for n in range(MAX_PREFIXES + 10):
        uses.on_use(blocks(f"p{n}", 1), RequestId(f"cmpl-{n}"), 0.0)
    hot = {p.last for p in uses.hottest(2 * MAX_PREFIXES, 0.0)}
    assert len(hot) == MAX_PREFIXES
    assert "cmpl-9" not in hot
    assert "cmpl-10" in hot


# -- activity ------------------------------------------------------------------------------------


def test_each_second_counts_what_became_of_requests_and_prompts(watched: Watched) -> None:
    for name in ("a", "b"):
        watched.serve(name, n_cached=16)
    watched.handle(RequestFinished(RequestId("a"), 3))
    watched.handle(RequestCancelled(RequestId("b")))
    watched.now += 1.0
    watched.handle(RequestArrived(a_request("c")))
    activity = watched.observer.requests.activity
    (second,) = activity.since(0.0, watched.now)
    assert (second.at_s, second.arrived, second.finished, second.cancelled) == (100, 2, 1, 1)
    assert (second.prompt_tokens, second.cached_tokens) == (80, 32)
    watched.now += 1.0
    watched.handle(Tick())
    (second,) = activity.since(100, watched.now)
    assert (second.at_s, second.arrived, second.running, second.waiting) == (101, 1, 1, 0)


def test_a_second_is_kept_for_ten_minutes(watched: Watched) -> None:
    for _ in range(KEPT_SECONDS + 50):
        watched.handle(Tick())
        watched.now += 1.0
    activity = watched.observer.requests.activity
    assert len(activity.since(0.0, watched.now)) <= KEPT_SECONDS
    assert activity.since(0.0, watched.now + KEPT_SECONDS + 1) == []


def test_a_lost_worker_is_an_event_with_the_requests_that_were_placed_again(
    watched: Watched,
) -> None:
    watched.join("decode-1")
    watched.serve("a")
    watched.lose("decode-0", "its lease ran out")
    watched.join("decode-0", generation=2)
    *_, left, back = watched.observer.workers.events
    assert (left.kind, left.worker_id, left.reason) == ("left", "decode-0", "its lease ran out")
    assert left.n_placed_again == 1
    assert (back.kind, back.worker_id, back.role) == ("joined", "decode-0", "decode")


def test_a_record_that_changed_is_no_event(watched: Watched) -> None:
    known = list(watched.observer.workers.events)
    watched.join("decode-0", draining=True)
    assert list(watched.observer.workers.events) == known


# -- latencies -----------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.25)


@pytest.fixture
def latencies(clock: FakeClock) -> LatencyHistory:
    return LatencyHistory(clock.now)


def test_a_second_is_told_when_it_is_over(latencies: LatencyHistory, clock: FakeClock) -> None:
    for n in range(1, 11):
        latencies.on_next_token(n / 100, clock.now())
    latencies.on_first_token(0.5, clock.now())
    assert latencies.since(0) == []
    clock.advance(1.0)
    (second,) = latencies.since(0)
    assert second.at_s == 1000
    tbt, ttft = second.tbt, second.ttft
    assert tbt is not None and (tbt.n, tbt.p50_s, tbt.p90_s) == (10, 0.05, 0.09)
    assert ttft is not None and (ttft.n, ttft.p50_s, ttft.p90_s) == (1, 0.5, 0.5)


def test_seconds_without_tokens_are_left_out_and_known_ones_not_told_again(
    latencies: LatencyHistory, clock: FakeClock
) -> None:
    latencies.on_next_token(0.1, clock.now())
    clock.advance(30)
    latencies.on_next_token(0.2, clock.now())
    clock.advance(1)
    assert [second.at_s for second in latencies.since(0)] == [1000, 1030]
    assert [second.at_s for second in latencies.since(1000)] == [1030]
    assert [second.ttft for second in latencies.since(1000)] == [None]


def test_ten_minutes_are_remembered(latencies: LatencyHistory, clock: FakeClock) -> None:
    for _ in range(KEPT_SECONDS + 50):
        latencies.on_next_token(0.1, clock.now())
        clock.advance(1)
    assert len(latencies.since(0)) == KEPT_SECONDS
    clock.advance(KEPT_SECONDS)
    assert latencies.since(0) == []


def test_a_busy_second_keeps_a_bounded_sample_from_all_of_it(
    latencies: LatencyHistory, clock: FakeClock
) -> None:
    n = 20 * MAX_SAMPLES
    for i in range(n):
        latencies.on_next_token(i / n, clock.now())
    clock.advance(1)
    (second,) = latencies.since(0)
    assert second.tbt is not None
    assert second.tbt.n == n
    assert second.tbt.p50_s == pytest.approx(0.5, abs=0.01)
    assert second.tbt.p90_s == pytest.approx(0.9, abs=0.01)
