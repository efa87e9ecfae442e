"""Ctrl-C and SIGTERM are noticed wherever the main thread stands when they come."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from halfmoon_cli.common.stop_signals import catch_stop_signals


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What Python raised where nothing could catch it."""
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: found.append(what.exc_type))
    yield found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait(number: signal.Signals) -> None:
    with catch_stop_signals() as stop:
        sender = threading.Timer(0.05, os.kill, (os.getpid(), number))
        sender.start()
        assert stop.wait(None)
        sender.join()


def test_a_signal_before_a_wait_is_not_lost() -> None:
    with catch_stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(60)
        assert stop.wait(60)


def test_the_first_signal_interrupts_and_further_ones_leave_the_way_out_alone() -> None:
    with catch_stop_signals(interrupting=True) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(60)


def test_an_interrupt_that_a_destructor_swallowed_is_known_all_the_same(
    dropped: list[object],
) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with catch_stop_signals(interrupting=True) as stop:
        Dying()
        assert dropped == [KeyboardInterrupt]
        assert stop.wait(60)


def test_the_handlers_before_are_there_again() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(KeyboardInterrupt), catch_stop_signals(interrupting=True):
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
