"""Hostile bytes on transfer connections: at an owner, and at an initiator.

At the owner: handshakes, proofs, records and frames that are random, mutated, cut or out of order.
Each connection is closed, in time. No byte changes that the sender has no key for, and none is
shown. An honest peer beside goes on, and nothing is left behind.

At the initiator: replies of the same kinds. A slice counts as applied only if its bytes are right,
and no byte beside it changes.

Both are tried in Python and in the extension, in the clear and with a cluster key.
`make fuzz N=20000 FUZZERS=tests/fuzz/test_transfer_frames.py` tries many;
`make test-native-sanitized` runs the extension's cases under AddressSanitizer.
"""

import contextlib
import gc
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import xxhash

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_protocol.regions import Region
from halfmoon_testing.fuzz_inputs import cut_anywhere, mutate_bytes, mutate_value, n_fuzz_inputs
from halfmoon_transfer import ClusterKey, Piece, TransferEngine, TransferSettings
from halfmoon_transfer.backends.backend_interface import CarryRequest
from halfmoon_transfer.backends.socket_io import ByteStream
from halfmoon_transfer.backends.tcp import native, tcp_frames
from halfmoon_transfer.backends.tcp.lane import Lane, LaneRefused, _parts
from halfmoon_transfer.backends.tcp.record_keys import KeyExchange
from halfmoon_transfer.backends.tcp.record_layer import encrypt_socket
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceReply,
    SliceRequest,
    TcpFrameError,
    TcpHello,
    TcpProof,
    TcpRequest,
)
from halfmoon_transfer.cluster_key import ProverRole, make_nonce
from halfmoon_transfer.interface import Op
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.planning.single_batch import as_single_batch
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.byte_ops import checksum
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.threads.stop_signal import StopSignal
from tests.fuzz.conftest import noted
from tests.nightly import by_day

N = n_fuzz_inputs(by_day(150, at_night=1000))
PATIENCE_S = 60.0
KEY = ClusterKey("the moon is made of green cheese")
OTHER = ClusterKey("the moon is made of blue cheese")
PAGE = 1000
N_PAGES = 20
#: Pages that the hostile peer may write, and what all others hold.
LANDING = (7, 8)
MARK = b"no peer sees me."
GENERATION = 5
#: What is said without a right proof of the cluster key.
UNPROVEN = ("noise", "hello", "proof", "stranger")
NEEDS_NATIVE = pytest.mark.skipif(
    bool(native.missing), reason=f"the extension is not built (`make native`): {native.missing}"
)
NATIVES = [pytest.param(False, id="Python"), pytest.param(True, id="C", marks=NEEDS_NATIVE)]
SECURITY = [
    pytest.param(None, False, id="open"),
    pytest.param(KEY, False, id="key"),
    pytest.param(KEY, True, id="encrypted"),
]


# -- at the owner ------------------------------------------------------------------------------


class Owner:
    """A segment with a pool, of which a hostile peer may write two pages, and an honest peer."""

    def __init__(self, key: ClusterKey | None, *, encrypt: bool, use_native: bool) -> None:
        settings = TransferSettings(
            cluster_key=key, encryption=encrypt, native=use_native, stall_timeout_s=PATIENCE_S
        )
        metadata = MemoryStore()
        options: Any = {"metadata": metadata, "backends": ("tcp",), "settings": settings}
        self.engine = TransferEngine.open("owner", generation=GENERATION, **options)
        self.honest = TransferEngine.open("honest", **options)
        self.pool = self.engine.allocate(N_PAGES * PAGE)
        self.pool.view[:] = (MARK * (len(self.pool.view) // len(MARK) + 1))[: len(self.pool.view)]
        ranges = [(page * PAGE, PAGE) for page in LANDING]
        self.grant = self.engine.grant(self.pool.region, ranges, "write", 36_000.0)
        #: What the hostile peer knows: a whole page to write and read, the last page of nothing.
        self.own = self.engine.allocate(PAGE)
        self.shared, self.local = self.engine.allocate(PAGE), self.honest.allocate(PAGE)
        endpoint = self.engine.descriptor.endpoints["tcp"]
        host, _, port = endpoint.address.rpartition(":")
        self.address = (host, int(port))
        self.n_honest = 0

    def work(self) -> None:
        """Write and read as an honest peer, and see the right bytes."""
        self.n_honest += 1
        said = self.n_honest.to_bytes(8, "little") * (PAGE // 8)
        self.local.view[:] = said
        piece = Piece(self.local.region, 0, self.shared.region, 0, PAGE)
        self.honest.transfer("write", [piece], PATIENCE_S)
        assert bytes(self.shared.view) == said
        self.local.view[:] = bytes(PAGE)
        self.honest.submit("read", [piece], PATIENCE_S).result(PATIENCE_S)
        assert bytes(self.local.view) == said

    def warm(self) -> None:
        """Make the owner's extension know all regions: it serves what was asked for once."""
        for memory in (self.pool, self.own):
            piece = Piece(self.local.region, 0, memory.region, 0, PAGE)
            self.honest.submit("read", [piece], PATIENCE_S).result(PATIENCE_S)

    def gap(self) -> bytes:
        """Return all bytes of the pool that the hostile peer has no key for."""
        first, last = LANDING[0] * PAGE, (LANDING[-1] + 1) * PAGE
        return bytes(self.pool.view[:first]) + bytes(self.pool.view[last:])

    def reachable(self) -> bytes:
        """Return all bytes that the hostile peer has a key for."""
        first, last = LANDING[0] * PAGE, (LANDING[-1] + 1) * PAGE
        return bytes(self.pool.view[first:last]) + bytes(self.own.view)

    def n_connections(self) -> int:
        return self.engine.backend("tcp").gauges().n_connections

    def close(self) -> None:
        self.honest.close()
        self.engine.close()


@pytest.fixture(autouse=True)
def _quick_collections() -> None:
    """Leave what is there out of the many collections of a test."""
    gc.freeze()


@pytest.fixture
def failures(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Return exceptions that ended a thread, and log lines that are no line."""
    found: list[str] = []
    before = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        found.append(f"{args.thread and args.thread.name}: {args.exc_value!r}")
        before(args)

    threading.excepthook = note
    caplog.set_level(logging.DEBUG, "halfmoon_transfer")
    yield found
    threading.excepthook = before


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def n_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def n_threads() -> int:
    return len([each for each in threading.enumerate() if "-serve" in each.name])


@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("use_native", NATIVES)
@pytest.mark.parametrize(("key", "encrypt"), SECURITY)
def test_no_bytes_on_a_connection_touch_what_they_have_no_key_for(
    key: ClusterKey | None,
    encrypt: bool,
    use_native: bool,
    dice: Random,
    failures: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = Owner(key, encrypt=encrypt, use_native=use_native)
    began_s = time.monotonic()
    acts: Counter[str] = Counter()
    try:
        owner.work()
        owner.warm()
        gap, before = owner.gap(), (n_descriptors(), n_threads(), owner.n_connections())
        peer = HostilePeer(owner, key, dice, encrypt=encrypt)
        for number in range(N):
            peer.said.clear()
            with noted(peer.told):
                # A connection that was reset may still be read from: as long as its thread lives.
                eventually(lambda: n_threads() == before[1], "a thread is left")
                reachable = owner.reachable()
                kind = peer.attack()
                acts[kind] += 1
                assert owner.gap() == gap, "bytes changed without a key"
                if key is not None and kind in UNPROVEN:
                    assert owner.reachable() == reachable, "bytes changed without a proof"
                if number % 8 == 0:
                    owner.work()
                assert failures == []
                for record in caplog.records:
                    assert record.getMessage().isprintable(), record.getMessage()
                caplog.clear()
            while owner.engine.notifications() is not None:
                pass
        eventually(lambda: owner.n_connections() == before[2], "a connection is left")
        eventually(lambda: n_threads() == before[1], "a thread is left")
        eventually(lambda: n_descriptors() == before[0], "a descriptor is left")
        owner.work()
        owner.engine.check()
    finally:
        owner.close()
    took_s = time.monotonic() - began_s
    print(f"{N} connections in {took_s:.1f} s: {dict(acts)}; {peer.n_applied} slices by right keys")
    assert peer.n_applied, "no frame got through to memory"


class HostilePeer:
    """Opens connections to an owner and says what it should not."""

    def __init__(
        self, owner: Owner, key: ClusterKey | None, dice: Random, *, encrypt: bool
    ) -> None:
        self.owner, self.key, self.dice, self.encrypt = owner, key, dice, encrypt
        #: What was sent on this connection, before encryption, for the note of a failure.
        self.said: list[bytes] = []
        #: A handshake's proof of an earlier connection.
        self.old_proof = tcp_frames.encode_proof(TcpProof(bytes(32)))
        #: Numbers of our connections, in a session of our own.
        self.session = b"hostile-session!"
        self.n_applied = 0
        self.n_dialled = 0

    def told(self) -> str:
        said = " | ".join(part[:200].hex() for part in self.said)
        return f"connection {self.n_dialled}: {said}"

    def attack(self) -> str:
        """Open a connection, speak, and wait for its end; return the kind of what was said."""
        kinds = ["noise", "hello", "frames", "frames", "frames"]
        if self.key is not None:
            kinds += ["proof", "stranger"]
        if self.encrypt:
            kinds += ["records", "records"]
        kind = self.dice.choice(kinds)
        self.n_dialled += 1
        with socket.create_connection(self.owner.address, timeout=PATIENCE_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream: ByteStream | None = sock
            with contextlib.suppress(OSError):
                match kind:
                    case "noise":
                        self.send(sock, self.dice.randbytes(self.dice.choice((0, 1, 7, 100, 9000))))
                    case "hello":
                        self.send(sock, self.bent_hello() + self.frames())
                    case "proof":
                        self.prove_wrongly(sock)
                    case "stranger":
                        self.send(sock, tcp_frames.encode_hello(self.hello()) + self.frames())
                    case "records":
                        stream = self.greet(sock)
                        if stream is not None:
                            self.send(sock, self.bent_records(stream))
                    case _:
                        stream = self.greet(sock)
                        if stream is not None:
                            self.send(stream, self.frames())
            self.hear_out(sock, stream or sock)
        return kind

    # Handshakes.

    def hello(self) -> TcpHello:
        keyed = self.key is not None
        return TcpHello(
            "owner",
            GENERATION,
            session=self.dice.choice((b"", self.session)),
            number=self.n_dialled,
            over=self.dice.choice(((), (1,), (2**63, self.n_dialled - 1))),
            origin=self.dice.choice(("hostile", "\x1b[2J\n" * 60)),
            nonce=make_nonce() if keyed else b"",
            share=KeyExchange().share if self.encrypt else b"",
        )

    def bent_hello(self) -> bytes:
        dice = self.dice
        whole = tcp_frames.encode_hello(self.hello())
        match dice.randrange(3):
            case 0:
                return mutate_bytes(dice, whole)
            case 1:
                return cut_anywhere(dice, whole)
        fields = msgspec.msgpack.decode(whole[tcp_frames.HELLO_HEADER_BYTES :])
        for _ in range(dice.choice((1, 1, 2, 3))):
            fields = mutate_value(dice, fields)
            if not isinstance(fields, dict):
                break
        try:
            body = msgspec.msgpack.encode(fields)[: 2**16 - 1]
        except (OverflowError, UnicodeEncodeError, RecursionError):
            body = dice.randbytes(20)
        return struct.pack("<4sBBH", b"HMTH", 1, 0, len(body)) + body

    def greet(self, sock: socket.socket) -> ByteStream | None:
        """Shake hands as an honest peer; return what carries frames then."""
        exchange = KeyExchange() if self.encrypt else None
        hello = self.hello()
        if exchange is not None:
            hello = msgspec.structs.replace(hello, share=exchange.share)
        sent = tcp_frames.encode_hello(hello)
        sock.sendall(sent)
        heard = self.hear_words(sock)
        own = tcp_frames.decode_hello(heard)
        if own.refused:
            return None
        if self.key is None:
            return sock
        maps = sent[tcp_frames.HELLO_HEADER_BYTES :], heard
        proof = tcp_frames.encode_proof(TcpProof(self.key.prove(ProverRole.INITIATOR, *maps)))
        self.old_proof = proof
        sock.sendall(proof)
        if tcp_frames.decode_proof(self.hear_words(sock)).refused:
            return None
        if exchange is None:
            return sock
        keys = exchange.agree(self.key, own.share, *maps)
        return encrypt_socket(sock, keys.initiator, keys.owner, use_native=False)

    def prove_wrongly(self, sock: socket.socket) -> None:
        dice = self.dice
        sent = tcp_frames.encode_hello(self.hello())
        sock.sendall(sent)
        heard = self.hear_words(sock)
        maps = sent[tcp_frames.HELLO_HEADER_BYTES :], heard
        assert self.key is not None
        right = self.key.prove(ProverRole.INITIATOR, *maps)
        reflected = self.key.prove(ProverRole.OWNER, *maps)
        stranger = OTHER.prove(ProverRole.INITIATOR, *maps)
        proofs = [
            self.old_proof,
            b"",
            *(
                tcp_frames.encode_proof(TcpProof(each))
                for each in (reflected, stranger, b"", bytes(32), right[:-1], right + b"\0")
            ),
            tcp_frames.encode_proof(TcpProof(mutate_bytes(dice, right), "refused")),
        ]
        wrong = dice.choice(proofs)
        if dice.random() < 0.3:
            wrong = mutate_bytes(dice, wrong)
        self.send(sock, wrong + self.frames())

    def hear_words(self, sock: socket.socket) -> bytes:
        header = sock.recv(tcp_frames.HELLO_HEADER_BYTES, socket.MSG_WAITALL)
        if len(header) < tcp_frames.HELLO_HEADER_BYTES:
            raise ConnectionError("the owner hung up")
        (length,) = struct.unpack_from("<H", header, 6)
        return sock.recv(length, socket.MSG_WAITALL)

    # Frames.

    def frames(self) -> bytes:
        while True:
            made = b"".join(self.frame() for _ in range(self.dice.choice((1, 1, 2, 3, 6))))
            # A mutation may have turned a nearly right key into the right one.
            if made and self.owner.pool.region.key not in made:
                return made

    def frame(self) -> bytes:
        """One frame that is right or mutated in one of many ways."""
        dice = self.dice
        whole, body = self.request()
        match dice.randrange(12):
            case 0:
                whole = mutate_bytes(dice, whole)
            case 1 | 2 | 3:
                # With the right checksum it is read further.
                head = bytearray(mutate_bytes(dice, whole[:-8]))
                whole = bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head)))
            case 4:
                whole, body = cut_anywhere(dice, whole + body), b""
            case 5:
                body = dice.choice((body[:-1], body + b"\0", b"", body * 2))
            case 6:
                whole = tcp_frames.encode_reply(
                    dice.choice((1, 2, 3, 255)), 1, [SliceReply(AccessStatus.OK, 7)] * 3
                )
            case 7:
                whole, body = tcp_frames.encode_failure("it was me"), b""
        return whole + body

    def request(self) -> tuple[bytes, bytes]:
        dice, owner = self.dice, self.owner
        if dice.random() < 0.12:
            message = OutgoingNotification(dice.randbytes(16), "hostile", dice.randbytes(30))
            whole = tcp_frames.encode_notification(1, self.generation(), message)
            return whole[:80], mutate_bytes(dice, whole[80:]) if dice.random() < 0.5 else whole[80:]
        write = dice.random() < 0.6
        sums = dice.random() < 0.8
        entries, bodies = [], []
        n = dice.choice((1, 1, 2, 5, 20))
        for _ in range(n):
            known = (owner.grant.key, owner.own.region.key, owner.own.region.key)
            strange = (self.near(owner.pool.region.key), dice.randbytes(16), bytes(16))
            key = dice.choice((*known, *strange))
            length = dice.choice((1, 8, PAGE, PAGE // 2, PAGE + 1, 3 * PAGE))
            if dice.random() < 0.05:
                length = dice.choice((0, 2**24, 2**24 + 1, 2**31, 2**32 - 1))
            offset = dice.choice((0, 1, PAGE - 1, PAGE, 7 * PAGE, 8 * PAGE - 1, 9 * PAGE - 1))
            if dice.random() < 0.1:
                offset = dice.choice((2**31, 2**32 - 1, 2**63, 2**64 - PAGE, 2**64 - 1))
            body = dice.randbytes(length) if write and length <= 3 * PAGE else b""
            right = xxhash.xxh3_64_intdigest(body) if write and sums else 0
            entries.append(
                SliceRequest(key, offset, length, right if dice.random() < 0.9 else right ^ 1)
            )
            bodies.append(body)
        op = tcp_frames.WRITE if write else tcp_frames.READ
        asked = TcpRequest(op, dice.randrange(9), self.generation(), sums, tuple(entries))
        return tcp_frames.encode_request(asked), b"".join(bodies)

    def generation(self) -> int:
        wrong = (0, GENERATION + 1, 2**64 - 1)
        return GENERATION if self.dice.random() < 0.9 else self.dice.choice(wrong)

    def near(self, key: bytes) -> bytes:
        """Return a key that differs in one bit from one that we don't have."""
        changed = bytearray(key)
        changed[self.dice.randrange(len(key))] ^= 1 << self.dice.randrange(8)
        return bytes(changed)

    def bent_records(self, stream: ByteStream) -> bytes:
        """Records as they would cross the wire, mutated there."""
        recorder = Recorder()
        sealed: Any = stream
        wire, sealed._socket = sealed._socket, recorder
        for _ in range(self.dice.randint(1, 3)):
            sealed.sendmsg([memoryview(self.frames())])
        sealed._socket = wire
        records = list(recorder.records)
        match self.dice.randrange(5):
            case 0:
                return mutate_bytes(self.dice, b"".join(records))
            case 1:
                return cut_anywhere(self.dice, b"".join(records))
            case 2:
                self.dice.shuffle(records)
                return b"".join(records)
            case 3:
                return b"".join([*records, self.dice.choice(records)])
            case _:
                length = self.dice.choice((0, 1, 65536, 65537, 2**32 - 1))
                return records[0] + struct.pack("<I", length) + self.dice.randbytes(200)

    # The wire.

    def send(self, stream: ByteStream, data: bytes) -> None:
        """Send in parts, cut anywhere."""
        self.said.append(data)
        dice = self.dice
        n_cuts = dice.choice((0, 0, 1, 3, 30))
        cuts = sorted(dice.randrange(len(data) + 1) for _ in range(n_cuts))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            left = memoryview(data)[start:end]
            while len(left):
                left = left[stream.sendmsg([left]) :]

    def hear_out(self, sock: socket.socket, stream: ByteStream) -> None:
        """Hang up in one direction, or at once, and wait for the owner to hang up too."""
        if self.dice.random() < 0.1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        buffer, heard = memoryview(bytearray(2**16)), bytearray()
        try:
            while n := stream.recv_into(buffer):
                heard += buffer[:n]
        except TimeoutError:
            pytest.fail("the owner neither answered nor hung up")
        except OSError:
            pass  # it hung up on unread bytes, or said something in the clear
        assert MARK not in heard, "bytes were shown without a key"
        self.n_applied += bytes(heard).count(b"HMTR\x01\x02")


class Recorder:
    """Takes the place of a socket, and keeps what is sent."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def sendall(self, data: memoryview) -> None:
        self.records.append(bytes(data))


# -- at the initiator --------------------------------------------------------------------------


THERE = SegmentDescriptor("there", GENERATION, "", {})
REMOTE = Region("there", GENERATION, bytes(range(16)), 2**40)


class HostileOwner(threading.Thread):
    """Accepts one connection's handshake, and says what its script says."""

    def __init__(
        self,
        sock: socket.socket,
        key: ClusterKey | None,
        script: bytes,
        dice: Random,
        encrypt: bool,
    ) -> None:
        super().__init__(daemon=True)
        self.sock, self.key, self.script, self.encrypt = sock, key, script, encrypt
        self.bends_hello = dice.random() < 0.15
        self.bends_proof = dice.random() < 0.15
        self.bends_record = dice.random() < 0.2
        self.dice = Random(dice.getrandbits(64))

    def run(self) -> None:
        with contextlib.suppress(OSError, TcpFrameError):
            self.play()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(65536):
                pass

    def play(self) -> None:
        asked = self._words()
        exchange = KeyExchange() if self.encrypt else None
        answer = tcp_frames.encode_hello(
            TcpHello(
                "there",
                GENERATION,
                nonce=make_nonce() if self.key else b"",
                share=exchange.share if exchange else b"",
            )
        )
        if self.bends_hello:
            answer = self.dice.choice((mutate_bytes, cut_anywhere))(self.dice, answer)
        self.sock.sendall(answer)
        maps = asked, answer[tcp_frames.HELLO_HEADER_BYTES :]
        stream: Any = self.sock
        if self.key is not None and not self.bends_hello:
            self._words()
            proof = tcp_frames.encode_proof(TcpProof(self.key.prove(ProverRole.OWNER, *maps)))
            if self.bends_proof:
                proof = self.dice.choice((mutate_bytes, cut_anywhere))(self.dice, proof)
            self.sock.sendall(proof)
            if exchange is not None:
                share = tcp_frames.decode_hello(asked).share
                keys = exchange.agree(self.key, share, *maps)
                # An initiator takes no record before its first request.
                if not self.bends_proof:
                    self.sock.recv(1, socket.MSG_PEEK)
                stream = encrypt_socket(self.sock, keys.owner, keys.initiator, use_native=False)
        if self.bends_record and stream is not self.sock:
            recorder = Recorder()
            stream._socket = recorder
            stream.sendmsg([memoryview(self.script or b"\0")])
            self.sock.sendall(mutate_bytes(self.dice, b"".join(recorder.records)))
        elif self.script:
            left = memoryview(self.script)
            while len(left):
                left = left[stream.sendmsg([left]) :]

    def _words(self) -> bytes:
        header = self.sock.recv(8, socket.MSG_WAITALL)
        (length,) = struct.unpack_from("<H", header.ljust(8, b"\0"), 6)
        return self.sock.recv(length, socket.MSG_WAITALL)


class Batch:
    """A batch between local memory with gaps and somewhere, and the bytes around it."""

    def __init__(self, dice: Random) -> None:
        sizes = [dice.choice((1, 8, 100, 3000)) for _ in range(dice.choice((1, 1, 3, 40, 300)))]
        self.op: Op = dice.choice(("read", "write"))
        self.memory = bytearray(dice.randbytes(sum(sizes) + 10 * len(sizes)))
        self.before = bytes(self.memory)
        local = RegionTable("here", 1).register(memoryview(self.memory), "*")
        pieces, self.views, at = [], [], 5
        self.places: list[slice] = []
        for size in sizes:
            pieces.append(Piece(local, at, REMOTE, 7 * at, size))
            self.views.append(memoryview(self.memory)[at : at + size])
            self.places.append(slice(at, at + size))
            at += size + 10
        batch = as_single_batch(self.op, pieces, "tcp", 2**40)
        assert batch is not None
        self.request = CarryRequest(batch, THERE, tuple(self.views), StopSignal.after(PATIENCE_S))
        #: What the owner holds.
        self.there = [dice.randbytes(size) for size in sizes]

    def right_replies(self) -> list[bytes]:
        write, replies = self.op == "write", []
        for number, part in enumerate(_parts(self.request)):
            answers = [
                SliceReply(AccessStatus.OK, 0 if write else checksum(memoryview(self.there[i])))
                for i in part
            ]
            op = tcp_frames.WRITE if write else tcp_frames.READ
            replies.append(tcp_frames.encode_reply(op, number, answers))
            replies.append(b"" if write else b"".join(self.there[i] for i in part))
        return replies

    def script(self, dice: Random) -> bytes:
        replies = self.right_replies()
        for _ in range(dice.choice((0, 1, 1, 2))):
            at = dice.randrange(len(replies))
            match dice.randrange(7):
                case 0:
                    replies[at] = mutate_bytes(dice, replies[at])
                case 1 | 2 if at % 2 == 0:
                    head = mutate_bytes(dice, replies[at][:-8])
                    replies[at] = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
                case 3:
                    replies[at] = cut_anywhere(dice, replies[at])
                case 4:
                    replies.insert(
                        at, tcp_frames.encode_failure("\x1b\n" * dice.choice((0, 5, 600)))
                    )
                case 5:
                    replies.insert(at, dice.choice(replies))
                case _:
                    return cut_anywhere(dice, b"".join(replies))
        return b"".join(replies)

    def check(self, outcomes: list[SliceOutcome | None], *, trusted: bool) -> int:
        """Assert that only slices changed, and that what is applied is what was sent."""
        n_applied = 0
        after = bytearray(self.memory)
        for place, outcome, there in zip(self.places, outcomes, self.there, strict=True):
            applied = outcome is not None and outcome.kind.name == "APPLIED"
            n_applied += applied
            if self.op == "read":
                assert not (applied and trusted) or after[place] == there
                after[place] = self.before[place]
        assert after == self.before, "bytes changed beside the slices"
        return n_applied


@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("use_native", NATIVES)
@pytest.mark.parametrize(("key", "encrypt"), SECURITY)
def test_no_bytes_of_an_owner_change_memory_beside_the_slices(
    key: ClusterKey | None, encrypt: bool, use_native: bool, dice: Random
) -> None:
    before = n_descriptors()
    ends: Counter[str] = Counter()
    began_s, n_applied = time.monotonic(), 0
    for number in range(N):
        batch = Batch(dice)
        script = batch.script(dice)
        honest = script == b"".join(batch.right_replies())
        near, far = socket.socketpair()
        near.settimeout(None)
        timeout = struct.pack("@ll", int(PATIENCE_S), 0)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        owner = HostileOwner(far, key, script, dice, encrypt=encrypt)
        owner.start()
        lane = Lane(near, use_native=use_native)
        outcomes: list[SliceOutcome | None] = [None] * len(batch.views)
        with noted(f"input {number}: {batch.op}, {script[:400].hex()}"):
            try:
                lane.greet(TcpHello("there", GENERATION), key, encrypt=encrypt)
                lane.carry(batch.request, outcomes, checksums=True)
                ends["answered"] += 1
            except (TcpFrameError, LaneRefused, OSError) as error:
                assert not isinstance(error, (BlockingIOError, TimeoutError)), "it waited for ever"
                assert str(error).isprintable() and str(error), error
                ends[type(error).__name__] += 1
            finally:
                lane.abort()
                lane.close()
                owner.join(PATIENCE_S)
                far.close()
            assert not owner.is_alive()
            n_applied += batch.check(outcomes, trusted=honest)
    print(
        f"{N} owners in {time.monotonic() - began_s:.1f} s: {dict(ends)}, "
        f"{n_applied} slices applied"
    )
    assert n_descriptors() == before
    assert ends["answered"] and ends["TcpFrameError"] and n_applied
