"""Ranks in step with their engine's process: each end is noticed by the other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from halfmoon_engine.errors import EngineLost
from halfmoon_engine_vllm.rank_steps import StepServer

#: A rank that runs passes of two layers.
OBEDIENT = """
import sys
from halfmoon_engine_vllm.rank_steps import PassStopped, StepClient
steps = StepClient(sys.argv[1])
while True:
    try:
        for layer in range(2):
            steps.before_layer(layer)
            steps.after_layer(layer)
        steps.over()
    except PassStopped:
        steps.over()
"""
#: An engine's process, with a rank that never looks at its connections.
ENGINE = """
import multiprocessing, os
from halfmoon_engine_vllm.rank_lifetime import end_with_parent
from typing import Any

def run():
    end_with_parent()
    print(os.getpid(), flush=True)
    while True:
        pass

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=run).start()
"""


@contextmanager
def with_ranks(n: int) -> Iterator[tuple[StepServer, list["subprocess.Popen[bytes]"]]]:
    server = StepServer()
    folder = Path(server.path).parent
    assert folder.stat().st_mode & 0o77 == 0
    command = [sys.executable, "-c", OBEDIENT, server.path]
    ranks = [subprocess.Popen(command) for _ in range(n)]
    server.accept(n)
    assert not folder.exists(), "it stays once all ranks are connected"
    yield server, ranks
    server.close()
    for rank in ranks:
        rank.kill()
        rank.wait()


def test_hooks_follow_the_layers_of_all_ranks() -> None:
    calls: list[tuple[str, int]] = []

    def fail(layer: int) -> None:
        raise ConnectionError("no blocks")

    with with_ranks(2) as (server, _):
        for _ in range(2):
            server.follow(
                2, lambda i: calls.append(("before", i)), lambda i: calls.append(("after", i))
            )
        assert calls == [("before", 0), ("after", 0), ("before", 1), ("after", 1)] * 2
        with pytest.raises(ConnectionError, match="no blocks"):
            server.follow(2, fail, None)
        server.follow(2, lambda _: None, None)
        server.check_alive()


def test_a_killed_rank_is_named_between_passes_and_in_one() -> None:
    with with_ranks(2) as (server, (_, victim)):
        server.check_alive()

        def kill(layer: int) -> None:
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()

        finds: tuple[Any, ...] = (lambda: server.follow(2, kill, None), server.check_alive)
        for find in finds:
            with pytest.raises(EngineLost, match=f"rank of process {victim.pid} ended"):
                find()


def test_a_rank_ends_with_its_engine_whatever_it_does(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    engine = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    rank = psutil.Process(int(engine.stdout.readline()))
    engine.kill()
    engine.wait()
    rank.wait(timeout=60)
