"""Wait until no write that was given up can land any more.

Over TCP the bytes of a write that was cancelled, overdue or broken off may be on their way still. A
worker says that it has stopped, or returns room at a kvstore, when they can't land: then the memory
is given to others.

A host that stands still owes an answer for each write to it. One is asked for at a time, as each
question takes a thread for seconds, and others need threads too.
"""

import asyncio
from typing import Protocol
from weakref import WeakKeyDictionary

import structlog

from halfmoon_protocol.regions import Region
from halfmoon_transfer.interface import TransferError

log = structlog.get_logger()

#: Longest wait for the owner of the memory, in seconds. After five seconds of silence a conductor
#: takes a prefill worker to be unreachable, and the landing to be in doubt.
_PATIENCE_S = 3.0


class SettlesWrites(Protocol):
    """A transfer engine, as far as this module uses it."""

    def is_unsettled(self, region: Region) -> bool:
        """See `TransferEngine.is_unsettled`."""
        ...

    def settle(self, region: Region, timeout_s: float) -> None:
        """See `TransferEngine.settle`."""
        ...


#: The questions under way of each engine, by the start of a segment that is asked.
_under_way: WeakKeyDictionary[SettlesWrites, dict[tuple[str, int], asyncio.Task[bool]]] = (
    WeakKeyDictionary()
)


async def settle_writes(transfer: SettlesWrites, region: Region) -> bool:
    """Wait for a region's owner; return False if writes may land there still."""
    asked = _under_way.setdefault(transfer, {})
    owner = (region.segment, region.generation)
    while transfer.is_unsettled(region):
        question = asked.get(owner)
        if question is None:
            question = asked[owner] = asyncio.create_task(_ask(transfer, region))
            question.add_done_callback(lambda _: asked.pop(owner))
            return await asyncio.shield(question)
        # It may have begun before this write was given up. So a good answer says nothing about that
        # write, while no answer says that the owner gives none.
        if not await asyncio.shield(question):
            return False
    return True


async def _ask(transfer: SettlesWrites, region: Region) -> bool:
    try:
        await asyncio.to_thread(transfer.settle, region, _PATIENCE_S)
    except TransferError as error:
        log.warning("writes_in_doubt", owner=region.segment, reason=str(error))
        return False
    return True
