"""Clients, orders and views of clusters whose workers change their role."""

import asyncio
from typing import Any

from halfmoon_metadata import open_store
from halfmoon_protocol.ids import ConductorId, WorkerId
from halfmoon_protocol.messages import ChangeRole, Hello, Role, Welcome, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import list_members

#: Flags of a worker that changes whenever a conductor says so.
FLEXIBLE = [
    *("--dtype", "float32", "--block-size", "16", "--pool-mib", "32", "--no-measure"),
    *("--roles", "prefill,decode", "--role-cooldown-s", "0", "--drain-s", "120"),
]


def prompt_of(n: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [11 + salt % 300, 11 + salt // 300, *(10 + (i * 37) % 300 for i in range(n - 2))]


def members_of(cluster: Any, role: str) -> set[str]:
    """Workers that the conductor sends requests of this role."""
    there = cluster.workers().values()
    return {w["worker_id"] for w in there if w["role"] == role and not w["draining"]}


def require_one_load(cluster: Any, worker_id: str, n_changes: int) -> None:
    """The process loaded its model once, however often its worker changed."""
    found = cluster.metrics(worker_id)
    assert found["halfmoon_model_loads_total"] == 1
    assert found["halfmoon_role_changes_total"] == n_changes
    n_phases = 3
    assert found["halfmoon_role_change_seconds_count"] == n_phases * n_changes
    text = cluster.process(worker_id).log_path.read_text()
    assert sum('"loading"' in line or " loading " in line for line in text.splitlines()) == 1


def order_role(cluster: Any, worker_id: str, role: Role) -> WorkerInfo:
    """Order a change as a further conductor would; return the record once the worker drains."""
    return asyncio.run(_order_role(cluster.cluster.plan, WorkerId(worker_id), role))


async def _order_role(plan: Any, worker_id: WorkerId, role: Role) -> WorkerInfo:
    store = open_store(plan.metadata_url)
    network = ZmqNetwork()
    try:
        info = (await list_members(store))[worker_id]
        link = await network.dial(info.commands, info.events, key_id=info.key_id)
        link.send_now(Hello(conductor_id=ConductorId("another"), session=1))
        link.send_now(ChangeRole(role=role, reason="a test"))
        async with asyncio.timeout(60):
            while True:
                message = await link.receive()
                if isinstance(message, Welcome) and message.worker.draining:
                    return message.worker
    finally:
        await network.close()
        store.close()
