"""A forward pass that hangs ends its process, whatever holds it; others do not."""

import subprocess
import sys

import pytest

from halfmoon_runtime.worker.forward_watchdog import HUNG_STATUS, ForwardWatchdog

PROGRAM = """
import re, threading
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog

def waits_without_the_lock():
    threading.Event().wait()

def keeps_the_lock():
    re.match(r"(a+)+$", "a" * 60 + "b")

watch = ForwardWatchdog(0.2)
with watch.run_in_background():
    assert [watch.run(len, "four") for _ in range(1000)] == [4] * 1000
    threading.Event().wait(1.0)  # no pass runs: nothing is noticed
    print("still here", flush=True)
    watch.run({name})
print("never said")
"""


@pytest.mark.parametrize(
    ("name", "status"), [("waits_without_the_lock", HUNG_STATUS), ("keeps_the_lock", 1)]
)
def test_a_pass_that_hangs_ends_its_process_and_says_where(name: str, status: int) -> None:
    program = PROGRAM.replace("{name}", name)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert "still here" in done.stdout
    assert "never said" not in done.stdout
    assert f"in {name}" in done.stderr
    if status == HUNG_STATUS:
        assert "forward_hangs" in done.stdout + done.stderr
        assert "forward_limit_s" in done.stdout + done.stderr


class Watched:
    """A watch on a clock of the test's, and what it noticed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.noticed: list[tuple[float, float]] = []
        self.watch = ForwardWatchdog(
            10.0, on_hang=lambda *noticed: self.noticed.append(noticed), now=lambda: self.now
        )


def test_many_passes_that_take_long_together_or_fail_are_not_noticed() -> None:
    it = Watched()

    def forward(error: bool = False) -> None:
        it.now += 9.0
        it.watch.check()
        if error:
            raise ZeroDivisionError

    for _ in range(5):
        it.watch.run(forward)
        it.now += 100.0  # idle
        it.watch.check()
    with pytest.raises(ZeroDivisionError):
        it.watch.run(forward, error=True)
    it.now += 100.0
    it.watch.check()
    assert it.noticed == []
