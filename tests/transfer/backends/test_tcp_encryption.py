"""Encrypted TCP: nothing readable crosses the wire, and nothing that was changed is taken."""

import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_transfer import (
    ClusterKey,
    Lost,
    Memory,
    Piece,
    TransferEngine,
    TransferSettings,
    Untrusted,
    encryption_from_environment,
)
from halfmoon_transfer.backends import addresses
from halfmoon_transfer.backends.tcp import native, record_layer, tcp_frames
from halfmoon_transfer.backends.tcp.record_keys import KeyExchange
from halfmoon_transfer.backends.tcp.record_layer import (
    RECORD_BYTES,
    EncryptedSocket,
    encrypt_socket,
)
from halfmoon_transfer.backends.tcp.tcp_frames import TcpHello
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import Endpoint

PATIENCE_S = 60.0
KEY = ClusterKey("the moon is made of green cheese")
THERE, HERE = bytes(range(32)), bytes(range(32, 64))
NATIVE = pytest.param(
    True, id="C", marks=pytest.mark.skipif(not native.can_encrypt(), reason="no extension")
)
KINDS = [pytest.param(False, id="Python"), NATIVE]
fuzzing = settings(max_examples=100, deadline=None)


# Keys and records, byte for byte.


def test_both_sides_agree_on_the_keys_that_the_protocol_says() -> None:
    ours, theirs = (
        KeyExchange(X25519PrivateKey.from_private_bytes(bytes([n] * 32))) for n in (1, 2)
    )
    agreed = ours.agree(KEY, theirs.share, b"asked", b"answered")
    assert theirs.agree(KEY, ours.share, b"asked", b"answered") == agreed
    assert (agreed.initiator.hex(), agreed.owner.hex()) == KEYS
    assert agreed.initiator.hex() not in repr(agreed)


KEYS = (
    "e4ed4b8611c9c6d157b9d612d232e5d7b387d2991a465f60fe39e7e403326dff",
    "cba629e9815af040e0f281c08b6d668560b31b4986b0b8c0911662775140d911",
)


@contextmanager
def pair(native_here: bool, native_there: bool) -> Iterator[tuple["End", "End"]]:
    here, there = socket.socketpair()
    with here, there:
        for sock in (here, there):
            sock.settimeout(PATIENCE_S)
            sock.setblocking(True)
        yield (
            End(here, encrypt_socket(here, HERE, THERE, use_native=native_here)),
            End(there, encrypt_socket(there, THERE, HERE, use_native=native_there)),
        )


class End:
    """One end of a connection: its bare socket, and what encrypts it."""

    def __init__(self, bare: socket.socket, sealed: EncryptedSocket) -> None:
        self.bare = bare
        self.sealed = sealed

    def send(self, *buffers: bytes) -> None:
        self.sealed.sendmsg([memoryview(each) for each in buffers])

    def hear(self, n_bytes: int) -> bytes:
        got = memoryview(bytearray(n_bytes))
        n = 0
        while n < n_bytes and (n_more := self.sealed.recv_into(got[n:])):
            n += n_more
        return bytes(got[:n])


def take_records(sock: socket.socket, n: int) -> list[bytes]:
    """Take the next records off the wire, as they are."""
    taken = []
    for _ in range(n):
        header = sock.recv(4, socket.MSG_WAITALL)
        (n_plain,) = struct.unpack("<I", header)
        taken.append(header + sock.recv(n_plain + 16, socket.MSG_WAITALL))
    return taken


@pytest.mark.parametrize("use_native", KINDS)
def test_records_are_what_the_protocol_says(use_native: bool) -> None:
    with pair(use_native, use_native) as (here, there):
        here.send(b"half", b"", b"moon")
        here.send(b"rises")
        assert [each.hex() for each in take_records(there.bare, 2)] == RECORDS


RECORDS = [
    "080000008b4f8d3ff9300b37fd95cb20d4a6e15447a8424975c866b1",
    "05000000e9fc5776f2a274534b947a82b3393f3996a0161d64",
]


@pytest.mark.parametrize("native_there", KINDS)
@pytest.mark.parametrize("native_here", KINDS)
@fuzzing
@given(
    sizes=st.lists(st.sampled_from([1, 2, 1000, 65_535, 65_536, 65_537, 200_000]), max_size=5),
    step=st.sampled_from([1000, 65_536, 1 << 20]),
)
def test_what_is_sealed_is_opened_in_either_language(
    native_here: bool, native_there: bool, sizes: list[int], step: int
) -> None:
    buffers = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    whole = b"".join(buffers)
    with pair(native_here, native_there) as (here, there):
        sender = threading.Thread(target=here.send, args=buffers)
        sender.start()
        got = bytearray()
        while len(got) < len(whole):
            got += there.hear(min(step, len(whole) - len(got)))
        sender.join()
        assert got == whole
        there.send(b"thanks")
        assert here.hear(6) == b"thanks"


def _flip(taken: list[bytes], bit: int) -> list[bytes]:
    changed = bytearray(taken[0])
    changed[bit // 8] ^= 1 << bit % 8
    return [bytes(changed), *taken[1:]]


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit of the text flipped": lambda taken: _flip(taken, 40),
    "a bit of the tag flipped": lambda taken: _flip(taken, 8 * len(taken[0]) - 1),
    "a length made shorter": lambda taken: _flip(taken, 0),
    "a length of zero": lambda taken: [bytes(4), *taken],
    "a length too long": lambda taken: [b"\xff\xff\xff\xff", *taken],
    "the second first": lambda taken: [taken[1], taken[0]],
    "the first dropped": lambda taken: taken[1:],
    "sent back to its sender's peer twice": lambda taken: [taken[0], taken[0]],
}


@pytest.mark.parametrize("use_native", KINDS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_repeated_or_lost_record_is_noticed(use_native: bool, attack: str) -> None:
    with pair(use_native, use_native) as (here, there):
        here.send(b"first!!")
        here.send(b"second!")
        here.send(b"third!!")
        taken = take_records(there.bare, 3)
        for each in ATTACKS[attack](taken):
            here.bare.sendall(each)
        here.bare.shutdown(socket.SHUT_WR)
        n_right = 7 if attack.endswith("twice") else 0
        assert there.hear(n_right) == b"first!!"[:n_right]
        with pytest.raises(OSError, match=f"encrypted record {n_right // 7} is not as") as noticed:
            there.hear(1)
        assert noticed.value.errno == errno.EBADMSG


@pytest.mark.parametrize("use_native", KINDS)
def test_a_connection_cut_in_a_record_is_not_one_that_ended(use_native: bool) -> None:
    with pair(use_native, use_native) as (here, there):
        here.send(b"whole")
        (taken,) = take_records(there.bare, 1)
        here.bare.sendall(taken[:-1])
        here.bare.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the peer hung up in the middle"):
            there.hear(5)
    with pair(use_native, use_native) as (here, there):
        here.send(b"whole")
        here.bare.shutdown(socket.SHUT_WR)
        assert there.hear(6) == b"whole"


@pytest.mark.parametrize("use_native", KINDS)
def test_idling_between_records_is_told_from_stalling_in_one(use_native: bool) -> None:
    soon = struct.pack("@ll", 0, 1000)
    with pair(use_native, use_native) as (here, there):
        there.bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, soon)
        with pytest.raises(BlockingIOError):
            there.hear(1)
        here.bare.sendall(b"\x01")
        with pytest.raises(TimeoutError):
            there.hear(1)


@pytest.mark.parametrize("use_native", KINDS)
def test_a_key_seals_no_record_past_its_limit(
    use_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_layer, "MAX_RECORDS", 1)
    monkeypatch.setattr(record_layer, "_LAST_RECORD", 2)
    with pair(use_native, use_native) as (here, there):
        spent = [here.sealed.spent]
        here.send(b"one")
        assert [*spent, here.sealed.spent] == [False, True]
        here.send(b"two")
        with pytest.raises(OSError) as refused:
            here.send(b"three")
        assert refused.value.errno == errno.EKEYEXPIRED
        assert there.hear(6) == b"onetwo"


# Engines, with something between them.

PATTERN = b"KV that must not be read "
LONG = 1_000_000


class Relay:
    """Forwards between an initiator and an owner, and lets a test see and change what passes."""

    def __init__(self, owner: str) -> None:
        self._owner = addresses.split_address(owner, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = bytearray()
        #: Changes what passes; its second argument says whether the initiator sent it.
        self.change: Callable[[bytes, bool], bytes] = lambda data, _from_initiator: data

    def __enter__(self) -> "Relay":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._socks]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                initiator, _ = self._listener.accept()
            except OSError:
                return
            owner = socket.create_connection(self._owner)
            self._socks += [initiator, owner]
            for args in ((initiator, owner, True), (owner, initiator, False)):
                thread = threading.Thread(target=self._forward, args=args)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, from_initiator: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.recorded += data
                try:
                    target.sendall(self.change(data, from_initiator))
                except OSError:
                    if from_initiator:  # what the owner said last is still on its way
                        return
                    break
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()  # not only shut down: a sender would wait for room


class Ends:
    """Two engines that reach each other through a relay, and a region at each."""

    def __init__(
        self, world: Any, stack: ExitStack, here: TransferSettings, there: TransferSettings
    ):
        self.here: TransferEngine = world.open("here", settings=here)
        self.there: TransferEngine = world.open("there", settings=there)
        self.relay = stack.enter_context(Relay(self.there.descriptor.endpoints["tcp"].address))
        through = msgspec.structs.replace(
            self.there.descriptor, endpoints={"tcp": Endpoint(self.relay.address)}
        )
        world.metadata.put(records.PREFIX + "there", records.encode(through))
        self.local, self.remote = self.here.allocate(LONG), self.there.allocate(LONG)

    def move(self, op: Any, n_bytes: int = LONG, **more: Any) -> None:
        piece = Piece(self.local.region, 0, self.remote.region, 0, n_bytes)
        self.here.submit(op, [piece], **more).result(PATIENCE_S)


def settled(
    *, encryption: bool = True, use_native: bool = True, tries: int = 1
) -> TransferSettings:
    return TransferSettings(
        cluster_key=KEY, encryption=encryption, native=use_native, tries_per_path=tries
    )


@pytest.fixture
def make_ends(make_world: Any) -> Iterator[Callable[..., Ends]]:
    with ExitStack() as stack:
        yield lambda here, there: Ends(make_world("tcp"), stack, here, there)


def fill(memory: Memory) -> None:
    memory.view[:] = (PATTERN * (LONG // len(PATTERN) + 1))[:LONG]


@pytest.mark.parametrize("use_native", KINDS)
@pytest.mark.parametrize("encryption", [True, False])
def test_a_recorder_between_both_ends_sees_kv_only_without_encryption(
    make_ends: Any, use_native: bool, encryption: bool
) -> None:
    same = settled(encryption=encryption, use_native=use_native)
    ends = make_ends(same, same)
    fill(ends.local)
    ends.move("write")
    assert ends.remote.view == ends.local.view
    ends.local.view[:] = bytes(LONG)
    for _ in range(3):
        ends.move("read")
    assert ends.remote.view == ends.local.view
    ends.move("write", notify=b"landed: " + PATTERN)
    told = ends.there.notifications(PATIENCE_S)
    assert told is not None
    assert told.message == b"landed: " + PATTERN
    assert len(ends.relay.recorded) > 4 * LONG
    assert (PATTERN in ends.relay.recorded) is not encryption
    assert (b"HMTQ" in ends.relay.recorded) is not encryption
    assert (ends.remote.region.key in ends.relay.recorded) is not encryption


@pytest.mark.parametrize("use_native", KINDS)
@pytest.mark.parametrize("op", ["write", "read"])
def test_a_flipped_bit_ends_in_a_named_error_and_no_wrong_byte(
    make_ends: Any, use_native: bool, op: str
) -> None:
    ends = make_ends(settled(use_native=use_native), settled(use_native=use_native))
    ends.move(op, 10)
    source, target = (ends.local, ends.remote) if op == "write" else (ends.remote, ends.local)
    fill(source)

    def flip(data: bytes, from_initiator: bool) -> bytes:
        if from_initiator is not (op == "write") or len(data) < 1000:
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    ends.relay.change = flip
    with pytest.raises(Lost, match=r"encrypted record \d+ is not as its sender sealed it"):
        ends.move(op)
    whole = bytes(source.view)
    assert all(got in (0, right) for got, right in zip(target.view, whole, strict=True))
    ends.relay.change = lambda data, _: data
    ends.move(op)
    assert target.view == source.view


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (True, False, "transfer encryption is on here and off there"),
        (False, True, "transfer encryption is on there and off here"),
    ],
)
def test_sides_of_which_one_encrypts_refuse_each_other_by_name(
    make_ends: Any, caplog: pytest.LogCaptureFixture, ours: bool, theirs: bool, told: str
) -> None:
    ends = make_ends(settled(encryption=ours), settled(encryption=theirs))
    fill(ends.local)
    with pytest.raises(Untrusted, match=told) as refused:
        ends.move("write")
    assert "HALFMOON_TRANSFER_ENCRYPTION" in str(refused.value)
    assert bytes(ends.remote.view) == bytes(LONG)
    assert PATTERN not in ends.relay.recorded
    assert "segment here at 127.0.0.1: refused, only one side encrypts" in caplog.text


def _without_share(hello: TcpHello) -> TcpHello:
    return msgspec.structs.replace(hello, share=b"")


def _with_own_share(hello: TcpHello) -> TcpHello:
    return msgspec.structs.replace(hello, share=KeyExchange().share)


@pytest.mark.parametrize("changed", [_without_share, _with_own_share])
@pytest.mark.parametrize("sides", [(True,), (False,), (True, False)])
def test_nobody_in_between_can_weaken_the_encryption(
    make_ends: Any, changed: Callable[[TcpHello], TcpHello], sides: tuple[bool, ...]
) -> None:
    ends = make_ends(settled(), settled())

    def weaken(data: bytes, from_initiator: bool) -> bytes:
        if data[:4] != b"HMTH" or from_initiator not in sides:
            return data
        n_body = tcp_frames.HELLO_HEADER_BYTES + tcp_frames.hello_bytes(
            data[: tcp_frames.HELLO_HEADER_BYTES]
        )
        hello = tcp_frames.decode_hello(data[tcp_frames.HELLO_HEADER_BYTES : n_body])
        return tcp_frames.encode_hello(changed(hello)) + data[n_body:]

    ends.relay.change = weaken
    fill(ends.local)
    # An owner's refusal is nothing that an attacker could not say too: it is tried again.
    with pytest.raises((Untrusted, Lost)):
        ends.move("write")
    assert bytes(ends.remote.view) == bytes(LONG)
    assert PATTERN not in ends.relay.recorded


def test_a_connection_whose_keys_are_used_up_is_replaced(
    make_ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = make_ends(settled(), settled())
    fill(ends.local)
    seen = []
    monkeypatch.setattr(record_layer, "MAX_RECORDS", 2)
    for _ in range(3):
        ends.move("write")
        seen.append(ends.relay.recorded.count(b"HMTH"))
    assert seen == [2, 4, 6]
    assert ends.remote.view == ends.local.view


def test_without_libcrypto_python_encrypts(make_ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("halfmoon_transfer_native")
    monkeypatch.setattr("halfmoon_transfer_native.RECORDS_MISSING", "it is not installed")
    monkeypatch.delattr("halfmoon_transfer_native.Records")
    ends = make_ends(settled(), settled())
    fill(ends.local)
    for op in ("write", "read", "write"):
        ends.move(op)
    assert ends.remote.view == ends.local.view
    assert PATTERN not in ends.relay.recorded


def test_the_setting_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFMOON_TRANSFER_ENCRYPTION", raising=False)
    assert encryption_from_environment()
    monkeypatch.setenv("HALFMOON_TRANSFER_ENCRYPTION", "off")
    assert not encryption_from_environment()
    monkeypatch.setenv("HALFMOON_TRANSFER_ENCRYPTION", "maybe")
    with pytest.raises(ValueError, match="HALFMOON_TRANSFER_ENCRYPTION is 'maybe'"):
        encryption_from_environment()


@pytest.mark.parametrize("use_native", KINDS)
def test_what_the_peer_said_is_heard_by_one_that_could_not_send_all(
    make_ends: Any, use_native: bool
) -> None:
    """The owner says why it hangs up; here nothing more can be sent by then."""
    ends = make_ends(settled(use_native=use_native), settled(use_native=use_native))
    ends.move("write", 10)
    answered = threading.Event()
    n_passed = 0

    def flip_and_hold(data: bytes, from_initiator: bool) -> bytes:
        nonlocal n_passed
        if not from_initiator:
            answered.set()
            return data
        n_passed += len(data)
        if n_passed > 2 * RECORD_BYTES:
            assert answered.wait(PATIENCE_S)
        return data[:-1] + bytes([data[-1] ^ 1])

    ends.relay.change = flip_and_hold
    with pytest.raises(Lost, match=r"encrypted record \d+ is not as its sender sealed it"):
        ends.move("write")
