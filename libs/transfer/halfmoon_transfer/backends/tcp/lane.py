"""Send requests over one TCP connection: the initiator's side, one thread at a time.

Requests are sent ahead of their replies, so that the link stays busy while the peer works. The
window is small enough that outstanding replies always fit into the sockets' buffers. So the two
sides never wait for each other to read.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.peer_text import printable_text
from halfmoon_transfer.backends.socket_io import ByteStream, ReadAhead, hang_up, send_all
from halfmoon_transfer.backends.tcp import native, tcp_frames
from halfmoon_transfer.backends.tcp.record_keys import KeyExchange, RecordKeys
from halfmoon_transfer.backends.tcp.record_layer import EncryptedSocket, encrypt_socket
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceRequest,
    TcpFrameError,
    TcpHello,
    TcpProof,
    TcpReply,
    TcpRequest,
)
from halfmoon_transfer.cluster_key import ClusterKey, ProverRole, key_mismatch_hint, make_nonce
from halfmoon_transfer.encryption_setting import encryption_mismatch_hint
from halfmoon_transfer.interface import Op, Piece
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.planning.single_batch import as_single_batch
from halfmoon_transfer.planning.transfer_plan import APPLIED, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.byte_ops import checksum, flip_byte
from halfmoon_transfer.threads.stop_signal import StopSignal

#: Bytes and slices of one request, and requests ahead of the first reply.
_FRAME_BYTES = 1024 * 1024
_FRAME_SLICES = 256
_WINDOW = 4
_LIMITS = (_FRAME_BYTES, _FRAME_SLICES, _WINDOW)


class LaneRefused(Exception):
    """A connection that the owner refuses; `own` is the owner's hello."""

    def __init__(self, own: TcpHello) -> None:
        super().__init__(printable_text(own.refused))
        self.own = own


class LaneUntrusted(LaneRefused):
    """An owner with another cluster key, or only one side has a key or encrypts."""

    def __init__(self, own: TcpHello, reason: str) -> None:
        super().__init__(msgspec.structs.replace(own, refused=reason))


class Lane:
    """A connection that has been greeted."""

    def __init__(self, sock: socket.socket, number: int = 0, *, use_native: bool = False) -> None:
        self._plain_socket = sock
        #: The plain socket, or what encrypts it once both sides have proven the cluster key.
        self._socket: ByteStream = sock
        self._use_native = use_native
        self._ahead = ReadAhead(sock)
        #: Number of this connection in our session.
        self.number = number
        self._n_requests = 0
        #: Whether it has carried a batch: an idle connection may have died unnoticed.
        self.used = False
        #: Deadline of a use by the fast path, on the monotonic clock; and whether it is still open.
        self.deadline = float("inf")
        self.in_time = True

    @property
    def spent(self) -> bool:
        """Return whether it should be replaced, as its keys have encrypted so much."""
        return isinstance(self._socket, EncryptedSocket) and self._socket.spent

    def greet(
        self, hello: TcpHello, key: ClusterKey | None = None, *, encrypt: bool = False
    ) -> None:
        """Name the wanted segment, and check that it is the one that answers.

        Args:
            hello: names the segment.
            key: the cluster key.
            encrypt: whether to encrypt what follows; only with a key.

        Raises:
            LaneRefused: another segment answers, or it has no room.
            LaneUntrusted: the cluster keys of both sides differ, or only one encrypts.
            TcpFrameError: the answer is no frame.
            OSError: the connection broke.
        """
        if key is not None:
            hello = msgspec.structs.replace(hello, nonce=make_nonce())
        exchange = KeyExchange() if key is not None and encrypt else None
        if exchange is not None:
            hello = msgspec.structs.replace(hello, share=exchange.share)
        sent_hello = tcp_frames.encode_hello(hello)
        send_all(self._socket, [sent_hello])
        header = self._ahead.take(tcp_frames.HELLO_HEADER_BYTES)
        received_hello = bytes(self._ahead.take(tcp_frames.hello_bytes(header)))
        own = tcp_frames.decode_hello(received_hello)
        if key is None and own.nonce:
            raise LaneUntrusted(own, own.refused or key_mismatch_hint("there", "here"))
        if own.nonce and bool(own.share) != bool(exchange):
            sides = ("there", "here") if own.share else ("here", "there")
            raise LaneUntrusted(own, own.refused or encryption_mismatch_hint(*sides))
        if own.refused:
            raise LaneRefused(own)
        if key is None:
            return
        maps = sent_hello[tcp_frames.HELLO_HEADER_BYTES :], received_hello
        self._exchange_proofs(key, own, *maps)
        if exchange is not None:
            self._encrypt(exchange.agree(key, own.share, *maps))

    def _encrypt(self, keys: RecordKeys) -> None:
        """Encrypt all that follows."""
        if not self._ahead.empty:
            raise TcpFrameError("bytes that belong to no frame, before the first request")
        self._socket = encrypt_socket(
            self._plain_socket, keys.initiator, keys.owner, use_native=self._use_native
        )
        self._use_native = self._use_native and native.can_encrypt()
        self._ahead = ReadAhead(self._socket)

    def _exchange_proofs(
        self, key: ClusterKey, own: TcpHello, sent_hello: bytes, received_hello: bytes
    ) -> None:
        """Prove that we know the cluster key, then check the owner's proof."""
        if not own.nonce:
            raise LaneUntrusted(own, key_mismatch_hint("here", "there"))
        ours = TcpProof(key.prove(ProverRole.INITIATOR, sent_hello, received_hello))
        send_all(self._socket, [tcp_frames.encode_proof(ours)])
        header = self._ahead.take(tcp_frames.HELLO_HEADER_BYTES)
        theirs = tcp_frames.decode_proof(self._ahead.take(tcp_frames.proof_bytes(header)))
        if not key.accepts(theirs.proof, ProverRole.OWNER, sent_hello, received_hello):
            raise LaneUntrusted(own, theirs.refused or "it does not know our cluster key")
        if theirs.refused:
            raise LaneRefused(msgspec.structs.replace(own, refused=theirs.refused))

    def abort(self) -> None:
        """Wake the thread that uses the lane, from another one; the lane is unusable afterwards."""
        hang_up(self._socket)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def end(self) -> None:
        """End an overdue use by the fast path: `abort`, and remember that."""
        self.in_time = False
        self.abort()

    def carry(
        self, carried: CarryRequest, outcomes: list[SliceOutcome | None], *, checksums: bool
    ) -> None:
        """Move a batch, and fill in the outcomes as replies come.

        Raises:
            TcpFrameError: the peer sent something else than replies.
            OSError: the connection broke; slices without an outcome are lost.
        """
        self.used = True
        # It may be long since the batch was given to its thread: a dial took its time.
        if carried.stop.is_held:
            raise OSError("the engine's writes are held")
        # The extension can't damage slices on their way.
        if not self._use_native or carried.damage:
            self._carry(carried, list(_parts(carried)), outcomes, deque(), checksums=checksums)
            return
        batch, number = carried.batch, self._n_requests
        marks = bytearray(len(outcomes))
        try:
            n_sent, n_answered = native.carry(
                self._socket,
                self._ahead,
                batch.op,
                batch.slices,
                carried.local,
                batch.peer.generation,
                number,
                marks,
                checksums=checksums,
                limits=_LIMITS,
                spin_s=0.0,
            )
        finally:
            for index, mark in enumerate(marks):
                if mark:
                    outcomes[index] = _marked(carried, index, mark)
        self._n_requests += n_sent
        if n_sent > n_answered:
            self._carry_rest(carried, outcomes, number, n_sent, n_answered, checksums=checksums)

    def try_fast_path(
        self,
        peer: SegmentDescriptor,
        op: Op,
        pieces: Sequence[Piece],
        local: tuple[memoryview, ...],
        *,
        checksums: bool,
        spin_s: float,
    ) -> bool:
        """Move a few pieces; return whether all are applied.

        The extension polls for the reply for `spin_s` seconds before this thread sleeps.

        Raises:
            TcpFrameError: the peer sent something else than replies.
            OSError: the connection broke.
        """
        self.used = True
        number, n_sent, n_answered = self._n_requests, 0, 0
        if self._use_native:
            marks = bytearray(len(pieces))
            n_sent, n_answered = native.carry(
                self._socket,
                self._ahead,
                op,
                tuple(pieces),
                local,
                peer.generation,
                number,
                marks,
                checksums=checksums,
                limits=_LIMITS,
                spin_s=spin_s,
            )
            self._n_requests += n_sent
            if n_sent == n_answered:
                return marks.count(native.APPLIED) == len(pieces)
        batch = as_single_batch(op, pieces, "tcp", sum(piece.length for piece in pieces))
        assert batch is not None
        carried = CarryRequest(batch, peer, local, StopSignal(self.deadline))
        outcomes: list[SliceOutcome | None] = [None] * len(pieces)
        self._carry_rest(carried, outcomes, number, n_sent, n_answered, checksums=checksums)
        return all(outcome is APPLIED for outcome in outcomes)

    def _carry_rest(
        self,
        carried: CarryRequest,
        outcomes: list[SliceOutcome | None],
        number: int,
        n_sent: int,
        n_answered: int,
        *,
        checksums: bool,
    ) -> None:
        """Carry the rest of a batch; some of its requests, from this number on, were sent."""
        parts = list(_parts(carried))
        waiting = deque(enumerate(parts[n_answered:n_sent], number + n_answered))
        self._carry(carried, parts[n_sent:], outcomes, waiting, checksums=checksums)

    def _carry(
        self,
        carried: CarryRequest,
        parts: Sequence[Sequence[int]],
        outcomes: list[SliceOutcome | None],
        waiting: deque[tuple[int, Sequence[int]]],
        *,
        checksums: bool,
    ) -> None:
        """Send these parts, and receive the replies to them and to the parts in `waiting`."""
        for part in parts:
            if carried.stop.stopped:
                break
            if len(waiting) == _WINDOW:
                self._receive(carried, waiting.popleft(), outcomes, checksums=checksums)
            waiting.append((self._send(carried, part, checksums=checksums), part))
        while waiting:
            self._receive(carried, waiting.popleft(), outcomes, checksums=checksums)

    def notify(self, carried: CarryRequest) -> SliceOutcome:
        """Deliver a notification and wait for the answer.

        Raises:
            TcpFrameError: the peer sent something else than a reply.
            OSError: the connection broke; whether it was delivered is unknown.
        """
        self.used = True
        batch, number = carried.batch, self._n_requests
        assert batch.notification is not None
        self._n_requests += 1
        send_all(
            self._socket,
            [tcp_frames.encode_notification(number, batch.peer.generation, batch.notification)],
        )
        reply = self._reply()
        if (reply.op, reply.number, len(reply.slices)) != (tcp_frames.NOTIFY, number, 1):
            raise TcpFrameError("a reply that belongs to another request")
        return refusal_outcome(
            batch, batch.slices[0], reply.slices[0].status, reply.slices[0].detail
        )

    def _send(self, carried: CarryRequest, part: Sequence[int], *, checksums: bool) -> int:
        write = carried.batch.op == "write"
        number = self._n_requests
        self._n_requests += 1
        slices = tuple(
            SliceRequest(
                carried.batch.slices[index].remote.key,
                carried.batch.slices[index].remote_offset,
                carried.batch.slices[index].length,
                checksum(carried.local[index]) if write and checksums else 0,
            )
            for index in part
        )
        op = tcp_frames.WRITE if write else tcp_frames.READ
        generation = carried.batch.peer.generation
        head = tcp_frames.encode_request(TcpRequest(op, number, generation, checksums, slices))
        buffers: list[bytes | memoryview] = [head]
        if write:
            for index in part:
                buffers.extend(_in_flight(carried, index))
        try:
            send_all(self._socket, buffers)
        except ConnectionError:
            if write:
                self._raise_failure()
            raise
        return number

    def _raise_failure(self) -> None:
        """Raise what the peer said before it hung up, if it said anything; never waits for it.

        Raises:
            TcpFrameError: the peer could not read a request.
        """
        with contextlib.suppress(OSError):
            for _ in range(_WINDOW + 1):  # replies to earlier requests come before it
                self._reply()

    def _receive(
        self,
        carried: CarryRequest,
        sent: tuple[int, Sequence[int]],
        outcomes: list[SliceOutcome | None],
        *,
        checksums: bool,
    ) -> None:
        number, part = sent
        read = carried.batch.op == "read"
        reply = self._reply()
        wanted = (tcp_frames.READ if read else tcp_frames.WRITE, number, len(part))
        if (reply.op, reply.number, len(reply.slices)) != wanted:
            raise TcpFrameError("a reply that belongs to another request")
        fine = [
            index
            for index, answer in zip(part, reply.slices, strict=True)
            if answer.status is AccessStatus.OK
        ]
        if read and fine:
            self._ahead.fill([carried.local[index] for index in fine])
        for index, answer in zip(part, reply.slices, strict=True):
            status = answer.status
            if read and status is AccessStatus.OK:
                if index in carried.damage:
                    flip_byte(carried.local[index], carried.damage[index])
                if checksums and checksum(carried.local[index]) != answer.detail:
                    status = AccessStatus.CHECKSUM_MISMATCH
            each = carried.batch.slices[index]
            outcomes[index] = refusal_outcome(carried.batch, each, status, answer.detail)

    def _reply(self) -> TcpReply:
        header = self._ahead.take(tcp_frames.HEADER_BYTES)
        n_rest, n_text = tcp_frames.reply_rest_bytes(header)
        reply = tcp_frames.decode_reply(header, self._ahead.take(n_rest))
        if reply.op == tcp_frames.FAILED:
            text = printable_text(bytes(self._ahead.take(n_text)).decode(errors="replace"))
            raise TcpFrameError(f"the peer could not read our request: {text}")
        return reply


def _parts(carried: CarryRequest) -> Iterator[Sequence[int]]:
    """Yield the indices of the slices of each request."""
    part: list[int] = []
    n_bytes = 0
    for index, each in enumerate(carried.batch.slices):
        if part and (n_bytes + each.length > _FRAME_BYTES or len(part) == _FRAME_SLICES):
            yield part
            part, n_bytes = [], 0
        part.append(index)
        n_bytes += each.length
    if part:
        yield part


def _marked(carried: CarryRequest, index: int, mark: int) -> SliceOutcome:
    if mark == native.APPLIED:
        return APPLIED
    return refusal_outcome(
        carried.batch, carried.batch.slices[index], AccessStatus.CHECKSUM_MISMATCH, 0
    )


def _in_flight(carried: CarryRequest, index: int) -> list[bytes | memoryview]:
    """Return a slice's bytes to send, damaged if a fault was injected."""
    data = carried.local[index]
    if index not in carried.damage:
        return [data]
    position = carried.damage[index]
    return [data[:position], bytes([data[position] ^ 0xFF]), data[position + 1 :]]
