"""Hand out handles of device memory to peers that know a region's key: the owner's side."""

import logging
import socket

from halfmoon_transfer.backends.cuda.cuda_wire import (
    MAX_BYTES,
    THIS_PROCESS,
    CudaRegionDenial,
    CudaRegionGrant,
    CudaRegionRequest,
    CudaRegionRevocation,
    CudaWireError,
    decode_request,
    encode,
)
from halfmoon_transfer.backends.peer_credentials import PeerCredentials
from halfmoon_transfer.backends.unix_server import UnixServer
from halfmoon_transfer.devices.device_interface import DeviceError, NotExportable
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_table import RegionTable

_log = logging.getLogger(__name__)


class CudaServer(UnixServer):
    """Serves regions in device memory."""

    prefix = "halfmoon-device-"
    max_request_bytes = MAX_BYTES
    malformed = CudaWireError

    def __init__(self, regions: RegionTable, *, label: str, max_connections: int) -> None:
        super().__init__(label=label, max_connections=max_connections)
        self._regions = regions
        self.start()

    def _revocation(self, key: bytes) -> bytes:
        return encode(CudaRegionRevocation(key))

    def _unwanted(self, peer: PeerCredentials) -> str:
        return "" if peer.is_our_user else f"process {peer.pid} runs as another user"

    def _answer(self, connection: socket.socket, message: bytes) -> None:
        request = decode_request(message)
        with self._lock:
            try:
                granted = self._grant(request)
            except AccessRefused as refused:
                denial = CudaRegionDenial(request.key, refused.status, refused.detail)
                self._send(connection, encode(denial))
            else:
                self._send(connection, encode(granted))
                self._granted[connection].add(request.key)

    def _grant(self, request: CudaRegionRequest) -> CudaRegionGrant:
        entry, _ = self._regions.leases.acquire(request.generation, request.key, 0, 0, write=False)
        try:
            region = entry.backing
            if not isinstance(region, DeviceRegion):
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            handle = region.export()
            return CudaRegionGrant(
                key=request.key,
                length=region.length,
                writable=region.writable,
                device=region.device.identity,
                handle=handle,
                process=THIS_PROCESS,
                address=region.address,
            )
        except NotExportable as error:
            _log.info("a region of %s goes other router: %s", self._regions.segment, error)
            raise AccessRefused(AccessStatus.NOT_SHAREABLE) from error
        except DeviceError as error:
            raise AccessRefused(AccessStatus.DEVICE_FAILED, error.code) from error
        finally:
            self._regions.leases.release(entry)
