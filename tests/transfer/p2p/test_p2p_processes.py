"""Objects between processes: how much a publisher uploads, and who may end meanwhile."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from halfmoon_metadata import open_store
from halfmoon_testing.processes.p2p_process import P2PProcess
from halfmoon_testing.processes.segment_process import segment_pattern
from halfmoon_transfer import TransferEngine
from halfmoon_transfer.metadata import descriptor as segments
from halfmoon_transfer.p2p import P2PSettings, P2PStore
from halfmoon_transfer.p2p.object_record import ShardSource

MIB = 1024 * 1024


@pytest.fixture
def start(metadata_url: str) -> Iterator[Callable[[str], P2PProcess]]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(P2PProcess(name, metadata_url))


def test_one_publisher_uploads_less_than_twice_to_four_getters(
    start: Callable[[str], P2PProcess],
) -> None:
    n_bytes = 64 * MIB
    publisher = start("publisher")
    getters = [start(f"getter-{i}") for i in range(4)]
    publisher.ask(f"publish weights {n_bytes}")
    for getter in getters:
        getter.ask("list")
    for getter in getters:
        getter.send("get weights")
    answers = [getter.got() for getter in getters]
    assert all(each.right for each in answers)
    assert all(sum(each.report.bytes_from.values()) == n_bytes for each in answers)
    uploaded = sum(each.report.bytes_from.get("publisher", 0) for each in answers)
    assert n_bytes <= uploaded < 2 * n_bytes


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_ends_in_the_middle_changes_nothing(
    start: Callable[[str], P2PProcess], metadata_url: str, how: int
) -> None:
    n_bytes = 32 * MIB
    publisher, replica = start("publisher"), start("replica")
    publisher.ask(f"publish weights {n_bytes}")
    replica.send("get weights")
    assert replica.got().right
    metadata = open_store(metadata_url)
    calls: list[int] = []

    def strike(n_bytes: int) -> None:
        calls.append(n_bytes)
        if len(calls) == 5:
            os.kill(replica.pid, how)

    quick = P2PSettings(shard_timeout_s=2.0)
    with (
        TransferEngine.open("getter", metadata=metadata, backends=("tcp",)) as engine,
        P2PStore(engine, metadata, quick) as getter,
    ):
        got = bytearray(n_bytes)
        report = getter.get_replica("weights", [got], progress=strike)
        assert got == segment_pattern(n_bytes)
        assert report.n_failures > 0
        assert set(report.bytes_from) == {"publisher", "replica"}
        # Once its lease has run out, whoever meets it next takes it off the list.
        metadata.delete(segments.PREFIX + "replica")
        getter.drop("weights")
        getter.get_replica("weights", [got])
        assert ShardSource("replica", 1) not in {
            each.source for each in getter.lookup("weights").holders
        }
    metadata.close()
