"""What the core believes of what workers say: each of itself, within reason, and once."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    Cancel,
    DecodeReserved,
    KvstoreLoad,
    PrefillDone,
    ReserveDecode,
    SnapshotBlocks,
    Stage,
    StartPrefill,
    Welcome,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_scheduling.cluster.cluster_state import UnfitWorker
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.placement.prefill_groups import complete_groups
from halfmoon_testing.scheduling_inputs import LAYOUT, a_landing, a_request, a_worker

R1 = RequestId("cmpl-1")
OTHER = LAYOUT.__class__(
    model="halfmoon.bytes", n_layers=1, n_kv_heads=1, head_dim=64, dtype="float32", block_size=16
)


class Core:
    """A conductor whose books are audited after every event."""

    def __init__(self, *workers: str) -> None:
        self.conductor, self.now = Conductor(SchedulingConfig()), 0.0
        for worker in workers:
            self.handle(WorkerJoined(a_worker(worker)))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    def hear(self, worker: str, message: Any) -> list[tuple[str, Any]]:
        commands = self.handle(MessageReceived(WorkerId(worker), message))
        return [(c.worker_id, c.message) for c in commands if isinstance(c, Send)]


def test_a_group_of_a_thousand_million_stages_takes_no_memory() -> None:
    workers = [
        a_worker("prefill-0", stage=Stage("g", 0, 10**9)),
        a_worker("prefill-1", stage=Stage("g", 10**9 - 1, 10**9)),
        a_worker("prefill-2", stage=Stage("h", -1, 2)),
        a_worker("prefill-3", stage=Stage("h", 0, 2)),
        a_worker("prefill-4", stage=Stage("i", 5, 2)),
        a_worker("prefill-5", stage=Stage("i", 0, 2)),
    ]
    assert complete_groups(workers) == ()


def test_a_worker_speaks_for_itself_alone() -> None:
    core = Core("prefill-0", "decode-0", "decode-1")
    core.handle(RequestArrived(a_request()))
    usurped = a_worker("decode-0", generation=7)
    assert core.hear("decode-1", Welcome(worker=usurped)) == []
    known = core.conductor.cluster.get(WorkerId("decode-0"))
    assert known is not None and known.generation == 1
    assert core.conductor.phase_of(R1) is not None


def wrong_landings() -> dict[str, DecodeReserved]:
    good = a_landing("decode-0")
    region = Region("decode-0", 1, bytes(16), 3 * LAYOUT.block_bytes)

    def landing(value: Landing, expires_s: float = 60.0) -> DecodeReserved:
        return DecodeReserved(request_id=R1, landing=value, expires_s=expires_s)

    return {
        "no pages": landing(Landing(good.region, (), LAYOUT)),
        "too few": landing(Landing(good.region, (0, 1), LAYOUT)),
        "one of them twice": landing(Landing(good.region, (0, 1, 1), LAYOUT)),
        "beyond its region": landing(Landing(region, (0, 1, 3), LAYOUT)),
        "before its region": landing(Landing(region, (0, 1, -1), LAYOUT)),
        "of another layout": landing(Landing(good.region, good.pages, OTHER)),
        "for no time": landing(good, 0.0),
    }


@pytest.mark.parametrize("wrong", wrong_landings().values(), ids=wrong_landings().keys())
def test_a_landing_that_can_hold_nothing_is_given_back_and_another_worker_is_asked(
    wrong: DecodeReserved,
) -> None:
    core = Core("prefill-0", "decode-0", "decode-1")
    core.handle(RequestArrived(a_request()))
    asked = core.hear("decode-0", wrong)
    assert [(worker, type(message)) for worker, message in asked] == [
        ("decode-0", Cancel),
        ("decode-1", ReserveDecode),
    ]
    landing = DecodeReserved(request_id=R1, landing=a_landing("decode-1"), expires_s=60.0)
    ((_, start),) = core.hear("decode-1", landing)
    assert isinstance(start, StartPrefill)


def test_more_cached_tokens_than_a_prompt_has_teach_nothing() -> None:
    core = Core("prefill-0", "decode-0")
    core.handle(RequestArrived(a_request()))
    core.hear(
        "decode-0", DecodeReserved(request_id=R1, landing=a_landing("decode-0"), expires_s=60.0)
    )
    done = PrefillDone(
        request_id=R1, first_token=7, finish="", n_cached=2**47, queue_s=-1e9, compute_s=1e9,
        drain_s=0.0, fetched_bytes=2**47, fetch_s=1e9,
    )  # fmt: skip
    core.hear("prefill-0", done)
    core.handle(RequestArrived(a_request("cmpl-2")))
    assert core.conductor.decisions[-1].placement.ttft_s > 0


def test_a_kvstore_of_another_layout_shuts_no_worker_out_and_is_not_used() -> None:
    core = Core()
    core.handle(WorkerJoined(a_worker("kvstore-0", layout=OTHER)))
    core.handle(WorkerJoined(a_worker("kvstore-1", layout=None)))
    for worker in ("prefill-0", "decode-0"):
        assert core.handle(WorkerJoined(a_worker(worker))) == []
    cluster = core.conductor.cluster
    assert cluster.layout == LAYOUT
    assert [info.worker_id for info in cluster.accepting("kvstore")] == ["kvstore-1"]
    (name, reason), *more = cluster.unused_kvstores.items()
    assert name == "kvstore-0" and not more
    assert cluster.foreign_kvstores == {"kvstore-0"}
    assert "'halfmoon.bytes' at kvstore-0" in reason and "'tiny' at the cluster" in reason
    # Another model comes, whose blocks they are.
    for worker in ("prefill-0", "decode-0"):
        core.handle(WorkerLost(WorkerId(worker), "gone"))
    core.handle(WorkerJoined(a_worker("prefill-1", layout=OTHER)))
    assert cluster.home_of(WorkerId("prefill-1")) in ("kvstore-0", "kvstore-1")
    assert len(cluster.accepting("kvstore")) == 2


def test_a_kvstore_that_becomes_of_another_layout_stays_and_is_left_out() -> None:
    core = Core("prefill-0", "decode-0")
    core.handle(WorkerJoined(a_worker("kvstore-0", layout=None)))
    assert core.conductor.cluster.home_of(WorkerId("prefill-0")) == "kvstore-0"
    assert core.hear("kvstore-0", Welcome(worker=a_worker("kvstore-0", layout=OTHER))) == []
    assert core.conductor.cluster.home_of(WorkerId("prefill-0")) is None
    assert WorkerId("kvstore-0") in core.conductor.cluster


def test_a_worker_without_a_layout_is_refused_by_name() -> None:
    core = Core()
    with pytest.raises(UnfitWorker, match="prefill-0 states no KV layout"):
        core.conductor.cluster.join(a_worker("prefill-0", layout=None))


def test_a_kvstore_whose_numbers_never_fit_is_not_asked_over_and_over() -> None:
    core = Core("kvstore-0")
    absurd = KvstoreLoad(n_stored=0, n_reserved=0, n_leased=0, n_blocks=8, sequence=2**62)
    snapshot = BlocksSnapshot(sequence=3, hashes=())
    assert core.hear("kvstore-0", snapshot) == []
    asked = [type(m) for _, m in core.hear("kvstore-0", absurd)]
    for _ in range(10):
        asked += [type(m) for _, m in core.hear("kvstore-0", snapshot)]
        asked += [type(m) for _, m in core.hear("kvstore-0", absurd)]
    assert asked == [SnapshotBlocks] * 2
