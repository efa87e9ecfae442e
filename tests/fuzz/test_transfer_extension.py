"""Calls of the transfer extension with wrong arguments: an exception with a reason, or a result.

What is deep in a call (a slice whose attribute raises, a buffer that can't be written) must free
what the call holds by then. `make test-native-sanitized` runs this under AddressSanitizer.
"""

import os
import socket
import time
from collections import Counter
from random import Random
from typing import Any

import pytest

from halfmoon_testing.fuzz_inputs import n_fuzz_inputs
from halfmoon_transfer.backends.tcp import native

extension: Any = getattr(native, "extension", None)
pytestmark = [
    pytest.mark.skipif(
        bool(native.missing), reason=f"the extension is not built (`make native`): {native.missing}"
    ),
    pytest.mark.timeout(14_400),
]
N = n_fuzz_inputs(2_000)
KEY = bytes(range(16))
REFUSALS = (TypeError, ValueError, OverflowError, BufferError, AttributeError, OSError)
NUMBERS = (0, 1, -1, 2, 16, 31, 32, 1024, 8192, 65_536, 65_537, 2**24, 2**31, 2**63, 2**64, 10**30)
KEYS = (KEY, b"", KEY[:-1], KEY + b"x", bytes(16), "text", None, bytearray(KEY))


class Raising(Exception):
    """Raised by an attribute."""


class Remote:
    def __init__(self, key: Any) -> None:
        self._key = key

    @property
    def key(self) -> Any:
        if self._key is Raising:
            raise Raising
        return self._key


class Slice:
    def __init__(self, remote: Any, remote_offset: Any) -> None:
        self.remote, self.remote_offset = remote, remote_offset


class Caller:
    """Makes arguments: mostly right ones."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.table = extension.Table(1)
        self.memory = bytearray(b"m" * 4096)

    def number(self, right: int) -> Any:
        if self.dice.random() < 0.9:
            return right
        return self.dice.choice((*NUMBERS, None, 1.5, "1"))

    def key(self) -> Any:
        return KEY if self.dice.random() < 0.7 else self.dice.choice(KEYS)

    def buffer(self, n: int, *, writable: bool = True) -> Any:
        if self.dice.random() < 0.85:
            return memoryview(bytearray(n)) if writable else bytes(n)
        wrong = (bytes(n), bytearray(0), memoryview(bytearray(2 * n))[::2], None, "x", bytearray(1))
        return self.dice.choice(wrong)

    def slices(self) -> tuple[Any, Any]:
        n = self.dice.choice((0, 1, 1, 2, 5, 40))
        slices: list[Any] = []
        for _ in range(n):
            key: Any = KEY if self.dice.random() < 0.95 else self.dice.choice((*KEYS, Raising))
            offset = self.number(self.dice.randrange(4096))
            slices.append(Slice(Remote(key), offset) if self.dice.random() < 0.97 else object())
        local = [self.buffer(self.dice.choice((1, 8, 100, 4096))) for _ in range(n)]
        if self.dice.random() < 0.05:
            local = local[:-1]
        if self.dice.random() < 0.03:
            return slices, local
        return tuple(slices), tuple(local)

    def call(self, ours: socket.socket) -> str:
        dice = self.dice
        fd = ours.fileno() if dice.random() < 0.95 else dice.choice((-1, 10**6, 2**31, "fd", None))
        ahead = self.buffer(8192)
        start = self.number(0)
        end = self.number(dice.choice((0, 0, 8192, 40)))
        slices, local = self.slices()
        match dice.randrange(8):
            case 0:
                self.table.add(
                    self.key(), dice.choice((self.memory, self.buffer(100), b"readonly"))
                )
                return "add"
            case 1:
                self.table.remove(self.key(), dice.choice((0.0, -1.0, float("nan"), 1e-9)))
                return "remove"
            case 2:
                dice.choice((self.table.cut, lambda _: self.table.clear()))(self.key())
                return "cut"
            case 3:
                self.table.serve(fd, self.records(), ahead, start, end, 0.0)
                return "serve"
            case 4:
                extension.copy(dice.random() < 0.5, slices, local, self.buffer(4096))
                return "copy"
            case 5:
                extension.differing(slices, local, self.buffer(4096))
                return "differing"
            case 6:
                marks = bytearray(len(slices) if dice.random() < 0.95 else 3)
                limits = tuple(self.number(n) for n in (1_000_000, 256, 4))
                extension.carry(
                    *(fd, self.records(), ahead, start, end, 0.0, dice.random() < 0.5, True),
                    *(self.number(0), self.number(1), slices, local, marks, limits),
                )
                return "carry"
            case _:
                records = self.records()
                buffers = tuple(
                    self.buffer(70_000, writable=False) for _ in range(dice.choice((0, 1, 2)))
                )
                if records is not None and dice.random() < 0.5:
                    records.send(fd, buffers)
                elif records is not None:
                    records.receive(fd, self.buffer(100))
                return "records"

    def records(self) -> Any:
        if extension.RECORDS_MISSING or self.dice.random() < 0.4:
            return None if self.dice.random() < 0.95 else object()
        sizes = [
            32 if self.dice.random() < 0.95 else self.dice.choice((0, 16, 31, 33)) for _ in "ab"
        ]
        return extension.Records(bytes(sizes[0]), bytes(sizes[1]), self.number(3))


def test_wrong_arguments_end_in_an_exception_and_hold_nothing(dice: Random) -> None:
    if sanitized := os.environ.get("HALFMOON_SANITIZED"):
        assert extension.__file__.startswith(sanitized)
    caller = Caller(dice)
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    for _ in range(N):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(None)
            theirs.setblocking(False)
            theirs.send(dice.randbytes(dice.choice((0, 1, 40, 500))))
            theirs.shutdown(socket.SHUT_WR)
            if dice.random() < 0.2:
                theirs.close()
            try:
                ends[caller.call(ours)] += 1
            except REFUSALS as error:
                assert str(error), repr(error)
                ends[type(error).__name__] += 1
            except Raising:
                ends["Raising"] += 1
    caller.table.clear()
    # No call exports this memory any more: it can be resized.
    caller.memory.clear()
    print(f"{N} calls in {time.monotonic() - began_s:.1f} s: {dict(ends)}")
    assert ends["carry"] and ends["serve"] and ends["copy"] and ends["ValueError"]
