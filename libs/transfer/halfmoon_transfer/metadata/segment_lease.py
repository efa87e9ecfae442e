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


#: Seconds that `close` waits for the metadata server.
_CLOSE_S = 2.0


class Lease:
    """Publish a record in a thread, three times per lease duration, and remove it at the end."""

    def __init__(
        self,
        name: str,
        publish: Callable[[], None],
        withdraw: Callable[[], None],
        ttl_s: float,
        *,
        close_s: float = _CLOSE_S,
    ) -> None:
        """Start renewing.

        Args:
            name: the thread's name.
            publish: writes the record with a lease of `ttl_s`. It raises `TransferError` when
                the record must not be written any more, `MetadataError` when the store fails.
            withdraw: removes the record if it is still ours; it raises nothing.
            ttl_s: duration of the lease in seconds.
            close_s: seconds that `close` waits for the metadata server.
        """
        self._name = name
        self._publish = publish
        self._withdraw = withdraw
        self._close_s = close_s
        self._interval_s = ttl_s / 3
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the record, and end the thread.

        A metadata server that does not answer in time is not waited for: the record expires.
        """
        self._closing.set()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            _log.warning(
                "%s: the metadata server did not answer in %g s: the segment's record stays "
                "until it expires",
                self._name,
                self._close_s,
            )

    def _run(self) -> None:
        # One thread writes and removes the record, so that no renewal comes after the removal.
        if self._renew_until_closed():
            self._withdraw()

    def _renew_until_closed(self) -> bool:
        """Renew until `close`; return False if the record is not ours any more."""
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
                return False
            else:
                is_failing = False
        return True
