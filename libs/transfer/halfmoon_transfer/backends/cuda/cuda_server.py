"""The owner's side: hands out handles of device memory to whoever knows a region's key.

One thread serves all peers: requests are tiny and answered from a table.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time

from halfmoon_transfer.backends.cuda.cuda_wire import (
    MAX_BYTES,
    THIS_PROCESS,
    CudaRegionDenial,
    CudaRegionGrant,
    CudaRegionRequest,
    CudaRegionRevocation,
    CudaReply,
    CudaWireError,
    decode_request,
    encode,
)
from halfmoon_transfer.backends.peer_credentials import PeerCredentials
from halfmoon_transfer.devices.device_interface import DeviceError, NotExportable
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_table import RegionTable

_log = logging.getLogger(__name__)
_ACCEPT_PAUSE_S = 0.1


class CudaServer:
    """Listens at `address`, the name of an abstract Unix socket."""

    def __init__(self, regions: RegionTable, *, label: str, max_connections: int) -> None:
        self.address = f"halfmoon-device-{secrets.token_hex(12)}"
        self.n_malformed = 0
        self._regions = regions
        self._max_connections = max_connections
        #: Keys granted over each open connection.
        self._granted: dict[socket.socket, set[bytes]] = {}
        # Guards `_granted`, and that a revocation isn't overtaken by a grant.
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()

    @property
    def n_connections(self) -> int:
        """Peers connected now."""
        return len(self._granted)

    def revoke(self, key: bytes) -> None:
        """Tell all who were granted this region that it is gone."""
        with self._lock:
            for connection, keys in self._granted.items():
                if key in keys:
                    keys.discard(key)
                    _send(connection, CudaRegionRevocation(key))

    def close(self) -> None:
        """Hang up on everybody."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake:
                        with self._lock:
                            for connection in self._granted:
                                connection.close()
                            self._granted.clear()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors, accepting fails at once and again: don't spin.
            _log.warning("a peer could not connect: %s", error)
            time.sleep(_ACCEPT_PAUSE_S)
            return
        if len(self._granted) >= self._max_connections:
            _log.warning("a peer was turned away: %d are connected", len(self._granted))
            connection.close()
            return
        if not _is_our_user(connection):
            _log.warning("a peer that runs as another user was turned away")
            connection.close()
            return
        connection.setblocking(False)
        with self._lock:
            self._granted[connection] = set()
        selector.register(connection, selectors.EVENT_READ)

    def _serve(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Answer one request; hang up when there is none and won't be."""
        try:
            message = connection.recv(MAX_BYTES + 1)
            if message:
                self._answer(connection, decode_request(message))
                return
        except BlockingIOError:
            return
        except CudaWireError as error:
            self.n_malformed += 1
            _log.warning("hanging up on a peer: %s", error)
        except OSError:
            pass
        selector.unregister(connection)
        with self._lock:
            del self._granted[connection]
            connection.close()

    def _answer(self, connection: socket.socket, ask: CudaRegionRequest) -> None:
        with self._lock:
            try:
                granted = self._grant(ask)
            except AccessRefused as refused:
                _send(connection, CudaRegionDenial(ask.key, refused.status, refused.detail))
            else:
                _send(connection, granted)
                self._granted[connection].add(ask.key)

    def _grant(self, ask: CudaRegionRequest) -> CudaRegionGrant:
        entry, _ = self._regions.leases.acquire(ask.generation, ask.key, 0, 0, write=False)
        try:
            region = entry.backing
            if not isinstance(region, DeviceRegion):
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            handle = region.export()
            return CudaRegionGrant(
                key=ask.key,
                length=region.length,
                writable=region.writable,
                device=region.device.identity,
                handle=handle,
                process=THIS_PROCESS,
                address=region.address,
            )
        except NotExportable as error:
            _log.info("a region of %s goes other ways: %s", self._regions.segment, error)
            raise AccessRefused(AccessStatus.NOT_SHAREABLE) from error
        except DeviceError as error:
            raise AccessRefused(AccessStatus.DEVICE_FAILED, error.code) from error
        finally:
            self._regions.leases.release(entry)


def _is_our_user(connection: socket.socket) -> bool:
    try:
        return PeerCredentials.of(connection).is_our_user
    except OSError:
        return False


def _send(connection: socket.socket, said: CudaReply) -> None:
    """Send, or hang up: who reads so slowly that the socket is full can't be told anything."""
    try:
        connection.send(encode(said))
    except OSError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
