"""Renew the lease on our segment's record, so that the record expires when the process dies.

Renewing also restores a record that the metadata server has lost. It stops for good when a
later start of this segment has taken the name.
"""

import logging
import threading
from collections.abc import Callable

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_transfer.interface import TransferError

_log = logging.getLogger(__name__)


class Lease:
    """Publish a record in a thread, three times per lease duration."""

    def __init__(self, name: str, publish: Callable[[], None], ttl_s: float) -> None:
        """Start renewing.

        Args:
            name: the thread's name.
            publish: writes the record with a lease of `ttl_s`. It raises `TransferError` when
                the record must not be written any more, `MetadataError` when the store fails.
            ttl_s: duration of the lease in seconds.
        """
        self._publish = publish
        self._interval_s = ttl_s / 3
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the record stays until its lease expires."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        is_failing = False
        while not self._closing.wait(self._interval_s):
            try:
                self._publish()
            except MetadataError as error:
                if not is_failing:
                    _log.warning("the segment's record can't be renewed, still trying: %s", error)
                is_failing = True
            except TransferError as error:
                _log.error("the segment's record is not renewed any more: %s", error)
                return
            else:
                is_failing = False
