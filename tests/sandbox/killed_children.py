"""Sandboxed children that are killed as soon as they get a request."""

import os
import signal

import pytest

from halfmoon_sandbox import Child


def kill_next_children(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Kill the next `n` children that get a request, as the kernel does when it lacks memory."""
    begin, left = Child.begin, [*range(n)]

    def begin_and_die(child: Child, request: bytes, *, cpu_s: float) -> None:
        if left:
            left.pop()
            os.kill(child.pid, signal.SIGKILL)
        begin(child, request, cpu_s=cpu_s)

    monkeypatch.setattr(Child, "begin", begin_and_die)
