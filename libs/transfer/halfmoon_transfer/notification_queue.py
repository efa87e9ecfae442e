"""Queue the notifications of peers: bounded, each once, in the order of arrival.

A peer that gets no answer sends a notification again, perhaps over another path. A known id is
answered as delivered and not queued a second time.
"""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from halfmoon_transfer.interface import Notification, TransferError
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus

#: Ids remembered. A notification is sent again only while its transfer lives, so this bounds how
#: many others may come meanwhile.
_MAX_IDS = 65_536


class NotificationQueue:
    """The notifications for one segment. All methods are safe from any thread."""

    def __init__(self, segment: str, generation: int, capacity: int) -> None:
        self._segment = segment
        self._generation = generation
        self._capacity = capacity
        #: Notifications that were not taken yet; at most `capacity`.
        self._queue: deque[Notification] = deque()
        #: Ids of delivered notifications, the latest last.
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        #: Wakes asyncio waiters; each is called once, at the next arrival or at the end.
        self._wakers: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def deliver(self, generation: int, notification: OutgoingNotification) -> None:
        """Queue a message, unless it was queued before.

        Raises:
            AccessRefused: it is meant for another start of this segment, or there is no room.
        """
        with self._changed:
            if generation != self._generation or self._closed:
                raise AccessRefused(AccessStatus.OTHER_GENERATION, self._generation)
            if notification.id in self._seen:
                return
            if len(self._queue) >= self._capacity:
                raise AccessRefused(AccessStatus.NO_ROOM, self._capacity)
            self._seen[notification.id] = None
            if len(self._seen) > _MAX_IDS:
                self._seen.popitem(last=False)
            self._queue.append(Notification(notification.sender, notification.message))
            self._wake()

    def take(self, timeout_s: float | None) -> Notification | None:
        """Take the oldest message; return None if none came in time. Without a timeout, wait.

        Raises:
            TransferError: the engine is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed, timeout_s)
            return self._pop()

    async def wait(self, timeout_s: float | None) -> Notification | None:
        """Take a message from asyncio; a cancelled waiter loses none."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        while True:
            arrived = asyncio.Event()

            def wake(arrived: asyncio.Event = arrived) -> None:
                # A loop that was closed meanwhile raises; it has no waiters any more.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(arrived.set)

            with self._changed:
                left = None if deadline is None else deadline - time.monotonic()
                if self._queue or self._closed or (left is not None and left <= 0):
                    return self._pop()
                self._wakers.append(wake)
            try:
                # Not `wait_for`, which (until Python 3.12) loses a cancellation that comes
                # together with the arrival.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await arrived.wait()
            finally:
                with self._changed:
                    if wake in self._wakers:
                        self._wakers.remove(wake)

    def close(self) -> None:
        """Wake all waiters, which raise that the engine is closed."""
        with self._changed:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker()
        self._wakers.clear()

    def _pop(self) -> Notification | None:
        if self._queue:
            return self._queue.popleft()
        if self._closed:
            raise TransferError(f"the transfer engine of segment {self._segment} is closed")
        return None

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._changed:
            assert len(self._queue) <= self._capacity
            assert len(self._seen) <= _MAX_IDS
