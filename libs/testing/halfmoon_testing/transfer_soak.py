"""Run many mixed transfers under faults and check every byte, for tests and benchmarks.

Each worker owns one slot of memory on either side, and a copy of what the far slot must hold. It
fills one side, moves a random run of it, and compares both whole slots with the expected bytes. So
a byte that is wrong, missing, late or outside of the run is found. `TcpValve` injects the fault: a
forwarder that stops, holds its bytes, and continues later, like a network that is cut for a while.
"""

import contextlib
import itertools
import random
import socket
import threading
from collections import Counter
from functools import partial

import msgspec

from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Op, Piece, Transfer, TransferError

KIB = 1024
SLOT_BYTES = 256 * KIB
_POOL_BYTES = 4 * 1024 * KIB
_NOTIFY_EVERY = 4


class TcpValve:
    """Forward TCP connections to `target` while the valve is open; a context manager."""

    def __init__(self, host: str) -> None:
        self.target = ("", 0)
        #: Bytes read and not forwarded while the valve is shut.
        self.n_held_bytes = 0
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._pumps: set[threading.Thread] = set()
        self._closed = False
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def shut(self) -> None:
        """Hold all bytes from now on."""
        self._open.clear()

    def open(self) -> None:
        """Forward again, held bytes first."""
        self._open.set()

    def cut(self) -> None:
        """End all connections; later ones are forwarded."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def pumps(self) -> set[threading.Thread]:
        """Return the threads that forward; each serves one direction of one connection."""
        with self._lock:
            return set(self._pumps)

    def __enter__(self) -> "TcpValve":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut()
        for pump in self.pumps():
            pump.join()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                self._open.wait()
                far = socket.create_connection(self.target)
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                self._sockets |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    pump = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                    self._pumps.add(pump)
                    pump.start()

    def _hold(self, n_bytes: int) -> None:
        with self._lock:
            self.n_held_bytes += n_bytes
        self._open.wait()
        with self._lock:
            self.n_held_bytes -= n_bytes

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 * KIB):
                if not self._open.is_set():
                    self._hold(len(data))
                sink.sendall(data)
            self._open.wait()
            sink.shutdown(socket.SHUT_WR)
        with self._lock:
            self._pumps.discard(threading.current_thread())
            # The other direction may still carry bytes.
            if source in self._sockets:
                self._sockets.discard(source)
                if sink not in self._sockets:
                    source.close()
                    sink.close()


class TransferSoakResult(msgspec.Struct, frozen=True):
    """Result of a soak."""

    n_done: int
    n_bytes: int
    n_retries: int
    #: Errors of the transfers that failed.
    errors: tuple[str, ...]
    #: Descriptions of wrong bytes that were found.
    wrong: tuple[str, ...]
    #: Number of transfers whose end was reported more than once.
    n_reported_twice: int
    #: Notifications sent with successful transfers, and how many did not arrive exactly once.
    n_notified: int
    n_notified_wrong: int


class TransferSoak:
    """Run workers on one pair of transfer engines of this process."""

    def __init__(
        self, here: TransferEngine, there: TransferEngine, *, n_workers: int, seed: int
    ) -> None:
        self._here, self._there = here, there
        self._seed = seed
        self._n_workers = n_workers
        self._local = here.allocate(n_workers * SLOT_BYTES)
        self._remote = there.allocate(n_workers * SLOT_BYTES)
        self._pool = random.Random(seed).randbytes(_POOL_BYTES)
        self._lock = threading.Lock()
        self._reports: Counter[int] = Counter()
        self._errors: list[str] = []
        self._wrong: list[str] = []
        self._numbers = itertools.count()
        self._n_bytes = 0
        self._n_retries = 0
        self._sent: Counter[bytes] = Counter()
        self._got: Counter[bytes] = Counter()

    def run(self, n_transfers: int, deadline_s: float) -> TransferSoakResult:
        """Do so many transfers, shared among the workers; this blocks."""
        done = threading.Event()
        listener = threading.Thread(target=self._listen, args=(done,))
        listener.start()
        share = n_transfers // self._n_workers
        workers = [
            threading.Thread(target=self._work, args=(number, share, deadline_s))
            for number in range(self._n_workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        done.set()
        listener.join()
        notified = self._sent.keys() | self._got.keys()
        return TransferSoakResult(
            n_done=sum(self._reports.values()),
            n_bytes=self._n_bytes,
            n_retries=self._n_retries,
            errors=tuple(self._errors),
            wrong=tuple(self._wrong),
            n_reported_twice=sum(count > 1 for count in self._reports.values()),
            n_notified=len(self._sent),
            n_notified_wrong=sum(self._got[each] != self._sent[each] for each in notified),
        )

    def far_bytes(self) -> bytes:
        """Return all bytes of the far side."""
        return bytes(self._remote.view)

    def release(self) -> None:
        """Release the memory."""
        self._here.unregister(self._local.region)
        self._there.unregister(self._remote.region)
        del self._local, self._remote

    def _listen(self, done: threading.Event) -> None:
        while True:
            last = done.is_set()
            got = self._there.notifications(0.05)
            if got is not None:
                self._got[got.message] += 1
            elif last:
                return

    def _work(self, number: int, n_transfers: int, deadline_s: float) -> None:
        dice = random.Random(f"{self._seed}/{number}")
        base = number * SLOT_BYTES
        near = self._local.view[base : base + SLOT_BYTES]
        far = self._remote.view[base : base + SLOT_BYTES]
        for index in range(n_transfers):
            op: Op = dice.choice(("read", "write"))
            length = min(SLOT_BYTES, int(2 ** dice.uniform(0, 18.01)))
            at = dice.randrange(SLOT_BYTES - length + 1)
            start = dice.randrange(_POOL_BYTES - SLOT_BYTES)
            fresh = self._pool[start : start + length]
            source, sink = (near, far) if op == "write" else (far, near)
            source[at : at + length] = fresh
            before_source, before_sink = bytes(source), bytearray(sink)
            key = next(self._numbers)
            name = f"{number}/{key}"
            notify = name.encode() if index % _NOTIFY_EVERY == 0 else None
            piece = Piece(self._local.region, base + at, self._remote.region, base + at, length)
            transfer = self._here.submit(op, [piece], deadline_s, notify=notify)
            transfer.add_done_callback(partial(self._count, key))
            try:
                report = transfer.result(2 * deadline_s)
            except TransferError as error:
                with self._lock:
                    self._errors.append(f"{op} {name} of {length} bytes: {error}")
                continue
            before_sink[at : at + length] = fresh
            with self._lock:
                self._n_bytes += report.n_bytes
                self._n_retries += report.retries
                if notify is not None:
                    self._sent[notify] += 1
                if sink != before_sink or source != before_source:
                    self._wrong.append(f"{op} {name} of {length} bytes at {at}")

    def _count(self, key: int, transfer: Transfer) -> None:
        assert transfer.done()
        with self._lock:
            self._reports[key] += 1
