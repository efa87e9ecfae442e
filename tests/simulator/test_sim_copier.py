"""Copies of hot prefixes in the simulated world. A block has 16 tokens and 1,024 bytes.

A prefix of four blocks is asked about every eight seconds; three uses within a minute are hot.
"""

from typing import Any

import pytest

from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_protocol.messages import (
    AnyMessage,
    BlocksReplicated,
    KvstoreAddress,
    KvstoreRefused,
    ReplicateBlocks,
)
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.workloads.hot_prefixes import DOCUMENT_BLOCKS, hot_prefix_requests
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator import worlds
from tests.simulator.worlds import a_spec, audit_steps, audited

K0, K1 = WorkerId("kvstore-0"), WorkerId("kvstore-1")
BLOCKS = tuple(BlockHash(bytes([i]) * 16) for i in range(4))
#: Questions about one prefix until 56 s, each answered before the next one comes, and another
#: question much later.
ASKS = [
    *(a_trace_request(8.0 * i, n_input=70, prompt=i, shared=4) for i in range(8)),
    a_trace_request(1000.0, prompt=99),
]


def a_world(budget: float = 1e6, **more: Any) -> ClusterSim:
    choices = {"replication_bytes_per_s": budget, "replication_hot_uses": 3.0}
    return worlds.a_world(*ASKS, choices=choices, n_prefill=2, **more)


def holders(world: ClusterSim) -> list[str]:
    """Kvstores that hold the whole prefix."""
    prefix = [world.clients._block_hashes(ASKS[0])[i] for i in range(4)]
    return [name for name, k in world.kvstores.items() if all(b in k.cache for b in prefix)]


def test_a_hot_prefix_gets_a_second_holder_and_a_cold_copy_is_dropped() -> None:
    world = a_world()
    audit_steps(world, until=lambda: world.event_queue.now >= 60.0)
    assert sorted(holders(world)) == ["kvstore-0", "kvstore-1"]
    result = audited(world)
    assert len(holders(world)) == 1
    # Nobody asked the second worker, so nothing but the copies came to its kvstore.
    assert result.copied_bytes == result.summary().copied_bytes == 4 * 1024


def test_without_a_budget_nothing_is_copied() -> None:
    world = a_world(0.0)
    assert audited(world).copied_bytes == 0
    assert holders(world) == ["kvstore-0"]


def test_the_last_copy_stays_however_cold_it_is() -> None:
    world = a_world(faults=[WorkerFault(100.0, "kvstore-0")])
    audited(world)
    assert holders(world) == ["kvstore-1"]


class Pair:
    """Two kvstores on hosts of their own; the first one holds four blocks."""

    def __init__(self) -> None:
        self.event_queue = EventQueue()
        self.network = NetworkModel(
            self.event_queue, network_bytes_per_s=1024.0, local_bytes_per_s=1e9
        )
        self.answers: list[AnyMessage] = []
        self.stores: dict[WorkerId, SimKvstore] = {}
        for name in (K0, K1):
            self.stores[name] = SimKvstore(
                name,
                f"host of {name}",
                a_spec(n_prefill=2),
                64,
                self.event_queue,
                self.network,
                1024,
                peers=self.stores.get,
                publish=lambda worker_id, batch: None,
                answer=lambda worker_id, message: self.answers.append(message),
            )
        self.source, self.target = self.stores[K0], self.stores[K1]
        self.source.reserve("x", Ticket("x"), BLOCKS, None)
        self.source.commit("x", Ticket("x"), 4)

    def order(self, ticket: str = "t", source: str = "kvstore-0") -> None:
        address = KvstoreAddress(WorkerId(source), 1, "")
        layout = tiny_costs().layout(16)
        self.target.receive(ReplicateBlocks(Ticket(ticket), address, layout, BLOCKS, None, ()))

    def run(self) -> None:
        while self.event_queue.step():
            self.network.check()
            self.source.check()
            self.target.check()


def test_a_copy_takes_its_time_on_the_wires_and_shares_them() -> None:
    pair = Pair()
    pair.order()
    pair.run()
    assert pair.event_queue.now == 4.0
    assert pair.answers == [BlocksReplicated(ticket=Ticket("t"), n_blocks=4)]
    pair = Pair()
    ended: list[float] = []
    pair.network.start(pair.source.host, "decode", 4096, lambda: ended.append(pair.event_queue.now))
    pair.order()
    pair.run()
    assert ended == [8.0]  # four seconds if nothing were copied


@pytest.mark.parametrize("lost", [K0, K1])
def test_a_copy_whose_one_end_is_lost_leaves_nothing_held(lost: WorkerId) -> None:
    pair = Pair()
    pair.order()
    assert pair.target.cache.n_reserved == pair.source.cache.n_leased == 4
    if lost == K0:
        pair.target.copier.source_lost(pair.source)
        assert pair.target.cache.n_reserved == 0
        (answer,) = pair.answers
        assert isinstance(answer, KvstoreRefused) and "kvstore-0 is lost" in answer.reason
    else:
        pair.target.copier.crash()
        assert pair.source.cache.n_leased == 0
    pair.run()
    assert pair.target.cache.n_stored == pair.target.copier.copied_bytes == 0


def test_a_target_that_copies_already_and_a_source_that_is_gone_are_refusals() -> None:
    pair = Pair()
    pair.order("gone", source="kvstore-7")
    pair.order("first")
    pair.order("second")
    gone, busy = pair.answers
    assert isinstance(gone, KvstoreRefused) and "kvstore-7" in gone.reason
    assert isinstance(busy, KvstoreRefused) and busy.ticket == "second" and busy.retry_after_s > 0
    pair.run()
    assert pair.answers[2:] == [BlocksReplicated(ticket=Ticket("first"), n_blocks=4)]


def test_the_workload_asks_about_few_documents_and_the_first_one_most() -> None:
    # 20 s: nothing has changed yet.
    asks = hot_prefix_requests(n_requests=400, rate_per_s=20.0, seed=1)
    documents = [ask.blocks[:DOCUMENT_BLOCKS] for ask in asks]
    counts = sorted((documents.count(d) for d in set(documents)), reverse=True)
    assert len(counts) == 8
    assert counts[0] > 2 * counts[4]
    later = hot_prefix_requests(n_requests=6000, rate_per_s=20.0, seed=1)[-100:]
    assert {ask.blocks[:DOCUMENT_BLOCKS] for ask in later}.isdisjoint(documents)
    assert all(-(-ask.n_input // 512) == len(ask.blocks) for ask in asks)
