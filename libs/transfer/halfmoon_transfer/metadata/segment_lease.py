"""The lease on our segment's record: renewed while we live, so that it ends when we die.

It also brings the record back after the metadata server has lost it. That a later start of
this segment has taken the name is final: nothing is renewed any more.
"""

import logging
import threading
from collections.abc import Callable

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_transfer.interface import TransferError

_log = logging.getLogger(__name__)


class Lease:
    """One thread that publishes again and again; three times as often as needed."""

    def __init__(self, name: str, publish: Callable[[], None], ttl_s: float) -> None:
        """Start renewing.

        Args:
            name: of the thread.
            publish: writes the record with a lease of `ttl_s`; raises `TransferError` when
                it must not be written any more, `MetadataError` when it could not be.
            ttl_s: seconds of the lease.
        """
        self._publish = publish
        self._interval_s = ttl_s / 3
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the record stays until its lease ends."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        away = False
        while not self._closing.wait(self._interval_s):
            try:
                self._publish()
            except MetadataError as error:
                if not away:
                    _log.warning("the segment's record can't be renewed, still trying: %s", error)
                away = True
            except TransferError as error:
                _log.error("the segment's record is not renewed any more: %s", error)
                return
            else:
                away = False
