import socket
import time

import pytest

from halfmoon_transfer.backends.socket_io import ReadAhead, connect_any
from halfmoon_transfer.threads.stop_signal import StopSignal


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_a_name_that_no_host_can_have_is_a_failed_connection(host: str) -> None:
    until = time.monotonic() + 60
    with pytest.raises(ConnectionError, match="no host name"):
        connect_any(host, 1, until, StopSignal(until))


def test_a_connection_that_is_dialled_too_late_says_so() -> None:
    until = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no time is left to connect to '127\.0\.0\.1'"):
        connect_any("127.0.0.1", 1, until, StopSignal(until + 60))


def test_bytes_that_were_taken_do_not_come_again_after_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ahead = ReadAhead(ours)
        theirs.sendall(b"first")
        assert ahead.wait() and bytes(ahead.take(5)) == b"first"
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                ahead.wait()
        theirs.sendall(b"second")
        assert ahead.wait() and bytes(ahead.take(6)) == b"second"
