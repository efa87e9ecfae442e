"""Wait until no write that was given up can land any more.

Over TCP the bytes of a write that was cancelled, overdue or broken off may be on their way still. A
worker says that it has stopped, or returns room at a kvstore, when they can't land: then the memory
is given to others.
"""

import asyncio
from typing import Protocol

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


async def settle_writes(transfer: SettlesWrites, region: Region) -> bool:
    """Wait for a region's owner; return False if writes may land there still."""
    if not transfer.is_unsettled(region):
        return True
    try:
        await asyncio.to_thread(transfer.settle, region, _PATIENCE_S)
    except TransferError as error:
        log.warning("writes_in_doubt", owner=region.segment, reason=str(error))
        return False
    return True
