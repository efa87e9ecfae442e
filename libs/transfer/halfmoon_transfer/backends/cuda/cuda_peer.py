"""The asking side: one connection to an owner, and what it said about its regions.

The connection is the proof of life. It is looked at before and after each use of opened
memory: once it has closed, the memory is nobody's, and what was done to it counts as lost.
"""

import socket
import threading
import time
from collections.abc import Callable

from halfmoon_transfer.backends.cuda.cuda_wire import (
    MAX_BYTES,
    CudaRegionGrant,
    CudaRegionRequest,
    CudaRegionRevocation,
    CudaReply,
    CudaWireError,
    decode_reply,
    encode,
)
from halfmoon_transfer.backends.peer_credentials import PeerCredentials
from halfmoon_transfer.planning.transfer_plan import OutcomeKind
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.threads.stop_signal import StopSignal

#: How long an owner may take to answer: it looks into a table and asks its driver.
_ANSWER_S = 5.0
_POLL_S = 0.05


class CudaPeerGone(Exception):
    """The owner can't be reached, hung up, or makes no sense; the text says which."""

    fate = OutcomeKind.LOST


class CudaNotListening(CudaPeerGone):
    """The owner does not listen, or listens and does not answer: no other try will change that."""

    fate = OutcomeKind.UNREACHABLE


class CudaPeer:
    """One connection to one start of one owner."""

    def __init__(self, address: str, on_revoked: Callable[[bytes], None]) -> None:
        """Connect.

        Raises:
            PeerGone: no process listens there.
        """
        self.address = address
        self._on_revoked = on_revoked
        # One thread talks at a time.
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.connect("\0" + address)
        except OSError as error:
            self._socket.close()
            gone = CudaNotListening if isinstance(error, ConnectionRefusedError) else CudaPeerGone
            raise gone(f"no process listens at @{address}: {error}") from error
        if not PeerCredentials.of(self._socket).is_our_user:
            self._socket.close()
            raise CudaPeerGone(f"the owner at @{address} runs as another user")

    def require_alive(self) -> None:
        """Read what the owner said meanwhile.

        Raises:
            PeerGone: it hung up.
        """
        with self._lock:
            while (said := self._receive(0.0)) is not None:
                self._heed(said)

    def ask(self, generation: int, key: bytes, stop: StopSignal) -> CudaRegionGrant:
        """Ask for a region.

        Raises:
            Refused: the owner says no.
            PeerGone: it says nothing, or nothing that makes sense.
        """
        with self._lock:
            try:
                self._socket.settimeout(_ANSWER_S)
                self._socket.send(encode(CudaRegionRequest(generation, key)))
            except OSError as error:
                raise CudaPeerGone(f"the owner at @{self.address} hung up: {error}") from error
            until = time.monotonic() + min(_ANSWER_S, stop.remaining_s())
            while time.monotonic() <= until and not stop.stopped:
                said = self._receive(_POLL_S)
                if said is None:
                    continue
                if isinstance(said, CudaRegionRevocation) or said.key != key:
                    self._heed(said)
                elif isinstance(said, CudaRegionGrant):
                    return said
                else:
                    raise AccessRefused(said.status, said.detail)
            # An answer that comes after this would be taken for that of a later question.
            self._socket.close()
        gone = CudaPeerGone if stop.stopped or stop.remaining_s() == 0.0 else CudaNotListening
        raise gone(f"the owner at @{self.address} did not answer in time")

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._socket.close()

    def _receive(self, timeout_s: float) -> CudaReply | None:
        """One message; None when none is there (in time)."""
        try:
            self._socket.settimeout(timeout_s)
            message = self._socket.recv(MAX_BYTES + 1)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise CudaPeerGone(f"the owner at @{self.address} hung up: {error}") from error
        if not message:
            raise CudaPeerGone(f"the owner at @{self.address} hung up")
        try:
            return decode_reply(message)
        except CudaWireError as error:
            raise CudaPeerGone(str(error)) from error

    def _heed(self, said: CudaReply) -> None:
        """Act on what nobody waits for."""
        if isinstance(said, CudaRegionRevocation):
            self._on_revoked(said.key)
