"""Ask an owner for handles of its device memory."""

import os
from collections.abc import Callable

from halfmoon_transfer.backends.cuda.cuda_wire import (
    MAX_BYTES,
    CudaRegionDenial,
    CudaRegionGrant,
    CudaRegionRequest,
    CudaRegionRevocation,
    CudaReply,
    CudaWireError,
    decode_reply,
    encode,
)
from halfmoon_transfer.backends.unix_peer import UnixPeer, UnixPeerGone
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.threads.stop_signal import StopSignal


class CudaPeer(UnixPeer[CudaReply]):
    """One connection to one start of one owner."""

    #: The owner looks into a table and asks its driver.
    answer_s = 5.0
    max_reply_bytes = MAX_BYTES
    malformed = CudaWireError

    def __init__(self, address: str, on_revoked: Callable[[bytes], None]) -> None:
        """Connect.

        Raises:
            UnixPeerGone: no process of our user listens there.
        """
        super().__init__(address, on_revoked)
        if not self._owner.is_our_user:
            self.close()
            raise UnixPeerGone(f"the owner at @{address} runs as another user")

    def _decode(self, message: bytes) -> CudaReply:
        return decode_reply(message)

    def _revoked_key(self, reply: CudaReply) -> bytes | None:
        return reply.key if isinstance(reply, CudaRegionRevocation) else None

    def _refusal(self, reply: CudaReply) -> tuple[bytes, AccessRefused] | None:
        if isinstance(reply, CudaRegionDenial):
            return reply.key, AccessRefused(reply.status, reply.detail)
        return None

    def request_region(self, generation: int, key: bytes, stop: StopSignal) -> CudaRegionGrant:
        """Request a region's handle.

        Raises:
            AccessRefused: the owner refuses.
            UnixPeerGone: it hung up, sent nonsense, or did not answer.
        """
        request = encode(CudaRegionRequest(generation, key))
        with self._lock:
            granted, fd = self._ask(
                request,
                key,
                lambda each: isinstance(each, CudaRegionGrant) and each.key == key,
                stop,
            )
        if fd is not None:
            os.close(fd)
        assert isinstance(granted, CudaRegionGrant)
        return granted
