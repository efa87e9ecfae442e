"""The extension in C: what it does is what Python does, byte for byte, or it leaves it alone."""

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.regions import Region
from halfmoon_transfer import Piece, TransferSettings
from halfmoon_transfer.backends.backend_interface import CarryRequest
from halfmoon_transfer.backends.tcp import native, tcp_frames
from halfmoon_transfer.backends.tcp.lane import Lane
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceReply,
    SliceRequest,
    TcpFrameError,
    TcpRequest,
)
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.planning.single_batch import as_single_batch
from halfmoon_transfer.planning.transfer_plan import SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.byte_ops import checksum
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.threads.stop_signal import StopSignal

extension: Any = getattr(native, "extension", None)

pytestmark = pytest.mark.skipif(
    bool(native.missing), reason=f"the extension is not built (`make native`): {native.missing}"
)
PATIENCE_S = 60.0
GENERATION = 5
KEY = bytes(range(16))
fuzzing = settings(max_examples=150, deadline=None)


def test_at_both_ends_the_extension_does_the_work_unless_it_is_switched_off(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    pure = world.open("pure", settings=TransferSettings(native=False))
    local, remote = here.allocate(500_000), there.allocate(500_000)
    piece = Piece(local.region, 0, remote.region, 0, 500_000)
    own = Piece(pure.allocate(10).region, 0, remote.region, 0, 10)
    here.submit("read", [piece]).result(PATIENCE_S)
    pure.submit("read", [own]).result(PATIENCE_S)
    seen: list[str] = []
    for name in ("encode_request", "decode_request", "encode_reply", "decode_reply"):
        monkeypatch.setattr(tcp_frames, name, _noting(seen, name))
    # The region is known to the owner's extension now; no frame is seen by Python any more.
    local.view[:] = random.Random(1).randbytes(500_000)
    here.submit("write", [piece]).result(PATIENCE_S)
    assert remote.view == local.view
    here.transfer("read", [piece])
    assert seen == []
    pure.submit("read", [own]).result(PATIENCE_S)
    assert set(seen) == {"encode_request", "decode_reply"}


def _noting(seen: list[str], name: str) -> Callable[..., Any]:
    does = getattr(tcp_frames, name)

    def noted(*args: Any) -> Any:
        seen.append(name)
        return does(*args)

    return noted


# The owner's loop, talked to over a socket pair.


class Served:
    """Two regions in one buffer, served by the extension until something is unusual."""

    def __init__(self) -> None:
        self.whole = bytearray(3000)
        self.table = extension.Table(GENERATION)
        self.table.add(KEY, memoryview(self.whole)[1000:2000])
        self.table.add(b"r" * 16, bytes(1000))
        self.left, self.right = socket.socketpair()
        self.left.settimeout(PATIENCE_S)
        self.ahead = bytearray(16 * 1024)
        #: What was left for Python, or what ended the connection.
        self.end: bytes | OSError = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            start, end = self.table.serve(self.right.fileno(), None, self.ahead, 0, 0, 0.0)
            self.end = bytes(self.ahead[start:end])
        except OSError as error:
            self.end = error
        # Python would go on from here, and hang up at some time.
        with contextlib.suppress(OSError):
            self.right.shutdown(socket.SHUT_WR)
            while self.right.recv(65536):
                pass

    def finish(self) -> bytes:
        """Say no more; what was answered."""
        with contextlib.suppress(OSError):
            self.left.shutdown(socket.SHUT_WR)
        got = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while data := self.left.recv(65536):
                got += data
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.left.close()
        self.right.close()
        return bytes(got)

    def abandon(self) -> None:
        """End it, however far it came: an example may be given up in the middle."""
        with contextlib.suppress(OSError):
            self.left.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self.left.close()
        self.right.close()


@pytest.fixture
def serve() -> Iterator[Callable[[], Served]]:
    served: list[Served] = []

    def start() -> Served:
        served.append(Served())
        return served[-1]

    yield start
    for each in served:
        each.abandon()


def request(op: int, *slices: SliceRequest, number: int = 1, generation: int = GENERATION) -> bytes:
    return tcp_frames.encode_request(TcpRequest(op, number, generation, True, slices))


def written(offset: int, data: bytes, *, key: bytes = KEY) -> bytes:
    asked = SliceRequest(key, offset, len(data), checksum(memoryview(data)))
    return request(tcp_frames.WRITE, asked) + data


def test_its_replies_are_those_of_the_framing(serve: Callable[[], Served]) -> None:
    served = serve()
    served.whole[1000:1010] = b"0123456789"
    served.left.sendall(
        written(100, b"abc") + request(tcp_frames.READ, SliceRequest(KEY, 0, 10), number=2)
    )
    wrong = SliceRequest(KEY, 200, 3, 99)
    served.left.sendall(request(tcp_frames.WRITE, wrong, SliceRequest(KEY, 300, 1, 99)) + b"defg")
    mismatch = SliceReply(AccessStatus.CHECKSUM_MISMATCH)
    assert served.finish() == (
        tcp_frames.encode_reply(tcp_frames.WRITE, 1, [SliceReply(AccessStatus.OK)])
        + tcp_frames.encode_reply(
            tcp_frames.READ, 2, [SliceReply(AccessStatus.OK, checksum(memoryview(b"0123456789")))]
        )
        + b"0123456789"
        + tcp_frames.encode_reply(tcp_frames.WRITE, 1, [mismatch, mismatch])
    )
    assert served.whole[1100:1103] == b"abc"
    assert served.end == b""


unusual = [
    written(998, b"abc"),
    written(2**64 - 1, b"abc"),
    written(2**64 - 3, b"abc"),
    written(0, b"abc", key=b"?" * 16),
    written(0, b"abc", key=b"r" * 16),
    request(tcp_frames.READ, SliceRequest(KEY, 0, 10), generation=4),
    request(tcp_frames.READ, SliceRequest(KEY, 0, 10), SliceRequest(KEY, 1001, 1)),
    request(tcp_frames.READ, SliceRequest(KEY, 0, 0)),
    request(tcp_frames.READ, *[SliceRequest(KEY, 0, tcp_frames.MAX_SLICE_BYTES)] * 5),
    request(tcp_frames.READ, SliceRequest(KEY, 0, tcp_frames.MAX_SLICE_BYTES + 1)),
    request(tcp_frames.NOTIFY, SliceRequest(KEY, 0, 1)),
    request(tcp_frames.READ, *[SliceRequest(KEY, 0, 1)] * 1024),
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n        ",
    bytes(40),
]


@pytest.mark.parametrize("frame", unusual, ids=range(len(unusual)))
def test_what_is_not_allowed_or_no_frame_is_left_for_python_untouched(
    serve: Callable[[], Served], frame: bytes
) -> None:
    served = serve()
    served.left.sendall(written(0, b"fine") + frame)
    answered = served.finish()
    assert answered == tcp_frames.encode_reply(tcp_frames.WRITE, 1, [SliceReply(AccessStatus.OK)])
    # A head that does not fit into what is read ahead is taken by Python as well.
    assert isinstance(served.end, bytes) and served.end
    assert frame.startswith(served.end)
    assert served.whole == bytes(1000) + b"fine" + bytes(1996)


def test_a_region_is_let_go_of_when_its_last_access_has_ended(
    serve: Callable[[], Served], eventually: Callable[..., None]
) -> None:
    served = serve()
    served.left.sendall(written(0, b"x" * 1000)[:-1])
    eventually(lambda: served.whole[1998] == ord("x"))
    assert not served.table.remove(KEY, 0.05)
    with pytest.raises(BufferError):
        served.whole.clear()
    served.table.cut(bytes(16))
    assert not served.table.remove(KEY, 0.0)
    served.table.cut(KEY)
    assert served.table.remove(KEY, PATIENCE_S)
    assert served.finish() == b""
    assert isinstance(served.end, ConnectionError)
    served.table.remove(KEY, 0.0)
    served.whole.clear()


def test_a_peer_that_stalls_in_the_middle_is_given_up_and_one_that_idles_is_not(
    serve: Callable[[], Served], eventually: Callable[..., None]
) -> None:
    served = serve()
    served.right.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
    served.left.sendall(written(0, b"abc"))
    served.left.recv(1000)
    threading.Event().wait(0.12)
    served.left.sendall(written(0, b"def")[:-1])
    eventually(lambda: isinstance(served.end, BlockingIOError))
    assert served.whole[1000:1002] == b"de"
    served.finish()


# The initiator's call.

PEER = SegmentDescriptor("there", GENERATION, "", {})
REGION = Region("there", GENERATION, KEY, 2**40)


def errand_of(op: Any, sizes: list[int], seed: int) -> tuple[CarryRequest, bytearray]:
    """Slices of these sizes between a buffer of random bytes, with gaps, and somewhere."""
    memory = bytearray(random.Random(seed).randbytes(sum(sizes) + 10 * len(sizes)))
    table = RegionTable("here", 1)
    local = table.register(memoryview(memory), "*")
    pieces, views, at = [], [], 5
    for size in sizes:
        pieces.append(Piece(local, at, REGION, 7 * at, size))
        views.append(memoryview(memory)[at : at + size])
        at += size + 10
    batch = as_single_batch(op, pieces, "tcp", 2**40)
    assert batch is not None
    return CarryRequest(batch, PEER, tuple(views), StopSignal.after(PATIENCE_S)), memory


def carried(
    errand: CarryRequest, reply: bytes, *, use_native: bool
) -> tuple[bytes, list[SliceOutcome | None], str]:
    """What a lane sends, what becomes of the slices, and the error, given all replies at once."""
    left, right = socket.socketpair()
    sent = bytearray()

    def play() -> None:
        with contextlib.suppress(OSError):
            left.sendall(reply)
            left.shutdown(socket.SHUT_WR)
            while data := left.recv(65536):
                sent.extend(data)

    thread = threading.Thread(target=play)
    thread.start()
    outcomes: list[SliceOutcome | None] = [None] * len(errand.batch.slices)
    error = ""
    lane = Lane(right, use_native=use_native)
    try:
        lane.carry(errand, outcomes, checksums=True)
    except TcpFrameError as caught:
        error = f"frame: {caught}"
    except OSError:
        error = "connection"
    lane.abort()
    lane.close()
    thread.join(PATIENCE_S)
    left.close()
    return bytes(sent), outcomes, error


def replies_to(errand: CarryRequest, statuses: list[AccessStatus]) -> bytes:
    """What an owner would answer, if each request were as large as the lane makes it."""
    from halfmoon_transfer.backends.tcp.lane import _parts

    stream = b""
    for number, part in enumerate(_parts(errand)):
        write = errand.batch.op == "write"
        answers = [
            SliceReply(
                statuses[index],
                checksum(errand.local[index]) if not write and statuses[index] == 0 else 0,
            )
            for index in part
        ]
        stream += tcp_frames.encode_reply(
            tcp_frames.WRITE if write else tcp_frames.READ, number, answers
        )
        if not write:
            stream += b"".join(
                errand.local[index] for index in part if statuses[index] is AccessStatus.OK
            )
    return stream


SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=5) | st.just([1] * 600)


@fuzzing
@given(op=st.sampled_from(["read", "write"]), sizes=SIZES, data=st.data())
def test_both_initiators_send_the_same_and_understand_the_same(
    op: str, sizes: list[int], data: st.DataObject
) -> None:
    """Whatever the replies are: good, refusing, damaged, cut short."""
    known = st.sampled_from(
        [AccessStatus.OK, AccessStatus.OUT_OF_BOUNDS, AccessStatus.CHECKSUM_MISMATCH]
    )
    statuses = [AccessStatus.OK] * len(sizes)
    for _ in range(data.draw(st.integers(0, 2))):
        statuses[data.draw(st.integers(0, len(sizes) - 1))] = data.draw(known)
    model, _ = errand_of(op, sizes, 1)
    reply = bytearray(replies_to(model, statuses))
    for _ in range(data.draw(st.integers(0, 2))):
        reply[data.draw(st.integers(0, len(reply) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        reply = reply[: data.draw(st.integers(0, len(reply)))]
    results = []
    for use_native in (True, False):
        errand, memory = errand_of(op, sizes, 1 if op == "write" else 2)
        before = bytes(memory)
        sent, outcomes, error = carried(errand, bytes(reply), use_native=use_native)
        # Between the slices nothing changes, and of a write nothing at all.
        at = 5
        for size in sizes:
            memory[at : at + size] = (
                before[at : at + size] if op == "read" else memory[at : at + size]
            )
            at += size + 10
        assert memory == before
        results.append((sent if not error else b"", outcomes, error))
    assert results[0] == results[1]


@pytest.mark.parametrize("use_native", [True, False])
def test_nothing_is_sent_over_a_connection_whose_dial_outlasted_the_leave_to_write(
    use_native: bool,
) -> None:
    errand, _ = errand_of("write", [100], 1)
    reply = replies_to(errand, [AccessStatus.OK])
    errand.stop.may_go_on = lambda: False
    assert carried(errand, reply, use_native=use_native) == (b"", [None], "connection")


def test_a_batch_of_many_requests_keeps_few_ahead_and_sends_the_same(make_world: Any) -> None:
    errand, _ = errand_of("write", [200_000] * 40, 3)
    reply = replies_to(errand, [AccessStatus.OK] * 40)
    by_native = carried(errand, reply, use_native=True)
    by_python = carried(errand, reply, use_native=False)
    assert by_native == by_python
    assert by_native[2] == "" and len(by_native[0]) > 8_000_000
