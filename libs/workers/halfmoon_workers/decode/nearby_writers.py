"""Watch whether workers of this host may write here by shared memory.

Keys of single landings cost nothing while writers are elsewhere. Those nearby would lose their
copies in memory. A look that is late costs speed, never a landing: its key is as good over TCP.
"""

import asyncio
from collections.abc import Callable

import structlog

from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import list_members

log = structlog.get_logger()

#: Seconds between two looks at the list of members, and the same for each of many.
_LOOK_S = 5.0
_LOOK_S_PER_MEMBER = 0.2


def has_writers_nearby(own: WorkerInfo, others: list[WorkerInfo]) -> bool:
    """Return whether another worker that prefills, or may come to, is on this worker's host."""
    return any(
        other.worker_id != own.worker_id and other.host == own.host and other.role != "kvstore"
        for other in others
    )


async def watch_nearby_writers(
    store: MetadataStore, own: WorkerInfo, tell: Callable[[bool], None], look_s: float = _LOOK_S
) -> None:
    """Tell at intervals whether there are writers nearby, until cancelled.

    Args:
        store: the metadata server; while it is away, nothing is told.
        own: the record of this worker.
        tell: called with the answer, changed or not.
        look_s: seconds between two looks, more where there are many members.
    """
    while True:
        n_members = 0
        try:
            others = list((await list_members(store)).values())
        except MetadataError:
            pass  # membership logs it
        else:
            n_members = len(others)
            tell(has_writers_nearby(own, others))
        await asyncio.sleep(max(look_s, _LOOK_S_PER_MEMBER * n_members))
