"""What the core believes of what workers say: each of itself, within reason, and once."""

from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    Cancel,
    DecodeReserved,
    KvstoreLoad,
    ReserveDecode,
    SnapshotBlocks,
    Stage,
    StartPrefill,
    Welcome,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_scheduling.placement.prefill_groups import complete_groups
from halfmoon_testing.scheduling_inputs import LAYOUT, a_landing, a_worker
from tests.scheduling.core import D0, D1, K0, P0, R1, Core, sent

OTHER = msgspec.structs.replace(LAYOUT, model="halfmoon.bytes", n_layers=1, head_dim=64)


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
    core.arrive()
    usurped = a_worker("decode-0", generation=7)
    assert core.hear("decode-1", Welcome(worker=usurped)) == []
    known = core.conductor.cluster.get(D0)
    assert known is not None and known.generation == 1
    assert core.phase() is not None


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
    core.arrive()
    assert sent(core.hear("decode-0", wrong)) == [(D0, Cancel), (D1, ReserveDecode)]
    assert sent(core.reserved("decode-1")) == [(P0, StartPrefill)]


def test_more_cached_tokens_than_a_prompt_has_teach_nothing() -> None:
    core = Core("prefill-0", "decode-0")
    core.arrive()
    core.reserved()
    absurd: Any = {"queue_s": -1e9, "compute_s": 1e9, "fetched_bytes": 2**47, "fetch_s": 1e9}
    core.prefilled(n_cached=2**47, **absurd)
    core.arrive("cmpl-2")
    assert core.placement.ttft_s > 0


def test_a_kvstore_of_another_layout_shuts_no_worker_out_and_is_not_used() -> None:
    core = Core()
    core.join("kvstore-0", layout=OTHER)
    core.join("kvstore-1", layout=None)
    for worker in ("prefill-0", "decode-0"):
        assert core.join(worker) == []
    cluster = core.conductor.cluster
    assert cluster.layout == LAYOUT
    assert [info.worker_id for info in cluster.accepting("kvstore")] == ["kvstore-1"]
    (name, reason), *more = cluster.unused_kvstores.items()
    assert name == "kvstore-0" and not more
    assert cluster.foreign_kvstores == {"kvstore-0"}
    assert "'halfmoon.bytes' at kvstore-0" in reason and "'tiny' at the cluster" in reason
    # Another model comes, whose blocks they are.
    for worker in ("prefill-0", "decode-0"):
        core.lose(worker)
    core.join("prefill-1", layout=OTHER)
    assert cluster.home_of(WorkerId("prefill-1")) in ("kvstore-0", "kvstore-1")
    assert len(cluster.accepting("kvstore")) == 2


def test_a_kvstore_that_becomes_of_another_layout_stays_and_is_left_out() -> None:
    core = Core("prefill-0", "decode-0")
    core.join("kvstore-0", layout=None)
    assert core.conductor.cluster.home_of(P0) == "kvstore-0"
    assert core.hear("kvstore-0", Welcome(worker=a_worker("kvstore-0", layout=OTHER))) == []
    assert core.conductor.cluster.home_of(P0) is None
    assert K0 in core.conductor.cluster


def test_a_kvstore_whose_numbers_never_fit_is_not_asked_over_and_over() -> None:
    core = Core("kvstore-0")
    absurd = KvstoreLoad(n_stored=0, n_reserved=0, n_leased=0, n_blocks=8, sequence=2**62)
    snapshot = BlocksSnapshot(sequence=3, hashes=())
    assert core.hear("kvstore-0", snapshot) == []
    as_known = msgspec.structs.replace(absurd, sequence=3)
    assert core.hear("kvstore-0", as_known) == []
    asked = sent(core.hear("kvstore-0", absurd))
    for _ in range(10):
        asked += sent(core.hear("kvstore-0", snapshot))
        asked += sent(core.hear("kvstore-0", absurd))
    assert asked == [(K0, SnapshotBlocks)] * 2
