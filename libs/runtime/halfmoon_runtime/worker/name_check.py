"""Refuse to start under the name of a worker that lives elsewhere.

A restarted worker takes its own record over at once: the process that wrote it is gone, and its
address answers no more. A process that hangs answers as little. But one that answers, and was not
told to leave, is another worker of the same name, and its memory would be lost.
"""

import asyncio

import structlog

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.ids import ConductorId, WorkerId
from halfmoon_protocol.messages import Hello, Welcome, WorkerInfo
from halfmoon_protocol.versions import MAX_VERSION, MIN_VERSION
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink
from halfmoon_runtime.channels.tcp_reach import tcp_fault
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_runtime.membership import MEMBERS, readable_members, until_done

#: Seconds in which a worker that lives answers. A start waits for them only where something
#: accepts connections at the address, or the address is on a host that is gone.
_ANSWER_S = 3.0
_REACH_S = 1.5

_log = structlog.get_logger(__name__)


class WorkerNameTaken(CannotStart):
    """A worker of this name is in service elsewhere."""


async def check_name(
    store: MetadataStore, network: Network, worker_id: WorkerId, *, answer_s: float = _ANSWER_S
) -> None:
    """Check that no other worker of this name is in service; wait for the metadata server.

    Args:
        store: holds the members' records.
        network: dials the address in the record.
        worker_id: name of the worker that starts.
        answer_s: seconds to wait for an answer from that address.

    Raises:
        WorkerNameTaken: one is, and answers.
    """
    key = MEMBERS + worker_id

    async def read() -> bytes | None:
        return await asyncio.to_thread(store.get, key)

    record = await until_done(key, read)
    there = readable_members({} if record is None else {key: record}).get(worker_id)
    if there is None or there.draining:
        return
    if await _answers(network, there, answer_s):
        raise WorkerNameTaken(
            f"worker {worker_id} is in service already, generation {there.generation} at "
            f"{there.commands}: stop it first, give this one another name with --worker-id, or "
            "keep the clusters apart with --cluster NAME or another --metadata"
        )
    _log.info("record_taken_over", worker_id=worker_id, generation=there.generation)


async def _answers(network: Network, info: WorkerInfo, limit_s: float) -> bool:
    """Return whether the start of a worker that wrote a record answers at its address."""
    if await tcp_fault(info.commands, min(_REACH_S, limit_s)):
        return False  # at once, where its port is closed
    try:
        async with asyncio.timeout(limit_s):
            link = await network.dial(info.commands, key_id=info.key_id)
            try:
                return await _is_welcomed(link, info)
            finally:
                await link.close()
    except (TimeoutError, PeerUnreachable):
        return False


async def _is_welcomed(link: WorkerLink, info: WorkerInfo) -> bool:
    """Ask a worker for its record, under its own name: it then counts as no conductor's."""
    link.send_now(
        Hello(
            conductor_id=ConductorId(info.worker_id),
            session=0,
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
        )
    )
    while True:
        message = await link.receive()
        if isinstance(message, Welcome):
            found = message.worker
            return (found.worker_id, found.generation) == (info.worker_id, info.generation)
