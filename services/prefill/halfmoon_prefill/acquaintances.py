"""Knowing all members before there are bytes for them, so that an outage need not be asked.

How a peer is reached stands in the metadata server, and is remembered once it was read. Who is
first asked for it when the server is away can't be reached, however well it is.
"""

import asyncio
from collections.abc import Iterable

import structlog

from halfmoon_metadata.store import MetadataError, MetadataStore
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import members
from halfmoon_transfer import TransferEngine, TransferError

log = structlog.get_logger()

#: Seconds between two looks at who is there.
LOOK_S = 2.0


async def keep_acquainted(
    store: MetadataStore, transfer: TransferEngine, own: WorkerId, *, look_s: float = LOOK_S
) -> None:
    """Look up each start of each other member soon after it has joined; until cancelled.

    Args:
        store: the metadata server; while it is away, what is known stays known.
        transfer: what remembers how they are reached.
        own: this worker.
        look_s: seconds between two looks.
    """
    while True:
        try:
            there = await members(store)
        except MetadataError:
            there = {}  # those who write to it say so
        others = [info for worker_id, info in there.items() if worker_id != own]
        await asyncio.to_thread(_meet, transfer, others)
        await asyncio.sleep(look_s)


def _meet(transfer: TransferEngine, others: Iterable[WorkerInfo]) -> None:
    for info in others:
        try:
            transfer.meet(info.worker_id, info.generation)
        except TransferError as error:
            # Its record may come later than its membership, or it is just leaving.
            log.debug("not_met", worker_id=info.worker_id, reason=str(error))
