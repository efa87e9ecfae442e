"""Keep answered responses by tenant and id, with the conversation that led to them.

A store that fails must not fail answers: after an error it rests for some seconds, in which nothing
is stored. Reading from it is an error that the client sees.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TypeVar

import msgspec
import structlog

from halfmoon_conductor.errors import ServiceUnavailable
from halfmoon_metadata import MetadataError
from halfmoon_metadata.value_store import ValueStore

#: Most bytes of one response with its conversation.
MAX_STORED_BYTES = 2 * 2**20
#: Seconds in which nothing is stored after the store has failed.
_REST_S = 5.0
_N_THREADS = 4
#: Seconds for one call, the wait for a thread included; an answer waits no longer for its store.
_CALL_LIMIT_S = 3.0
T = TypeVar("T")

log = structlog.get_logger()


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as it was answered, and all items of its conversation, both as JSON."""

    response: msgspec.Raw
    #: The items of the input, those of earlier responses included, then those of the output.
    items: msgspec.Raw


class ResponseStore:
    """Store responses in a `ValueStore`, off the event loop.

    Args:
        values: where they are kept; closed with this store.
        ttl_s: seconds after which they end, for error texts.
        clock: returns seconds.
        call_limit_s: seconds for one call, the wait for a thread included.
    """

    def __init__(
        self,
        values: ValueStore,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        call_limit_s: float = _CALL_LIMIT_S,
    ) -> None:
        self.ttl_s = ttl_s
        self._values = values
        self._clock = clock
        self._call_limit_s = call_limit_s
        self._rests_until_s = -1.0
        self._threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="responses")

    async def save(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        """Store a response; return False if it is too large, or the store fails."""
        if self._clock() < self._rests_until_s:
            return False
        value = msgspec.json.encode(stored)
        if len(value) > MAX_STORED_BYTES:
            return False
        try:
            return await self._run(lambda: self._values.put(_owner(tenant), response_id, value))
        except (MetadataError, TimeoutError) as error:
            self._rests_until_s = self._clock() + _REST_S
            log.warning("responses are not stored", error=_text(error), rest_s=_REST_S)
            return False

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of this tenant; None if it is not stored.

        Raises:
            ServiceUnavailable: the store fails.
        """
        value = await self._read(lambda: self._values.get(_owner(tenant), response_id))
        return None if value is None else msgspec.json.decode(value, type=StoredResponse)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response of this tenant; return False if it is not stored.

        Raises:
            ServiceUnavailable: the store fails.
        """
        return await self._read(lambda: self._values.delete(_owner(tenant), response_id))

    def close(self) -> None:
        """Close the store; what is being written may be lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._values.close()

    async def _read(self, call: Callable[[], T]) -> T:
        try:
            return await self._run(call)
        except (MetadataError, TimeoutError) as error:
            log.warning("stored responses can't be read", error=_text(error))
            raise ServiceUnavailable(
                "Stored responses can't be read at present: send the whole conversation.",
                retry_after_s=_REST_S,
            ) from None

    async def _run(self, call: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await asyncio.wait_for(running, self._call_limit_s)


def _text(error: Exception) -> str:
    return str(error) or "it takes too long"


def _owner(tenant: str) -> str:
    """Return the name under which a tenant's responses are kept; tenants have any names."""
    return blake2b(tenant.encode(), digest_size=16).hexdigest()
