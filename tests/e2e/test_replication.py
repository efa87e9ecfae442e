"""A conductor that copies hot prefixes between live kvstores, one of which has no use for them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from halfmoon_metadata import open_store
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import KvstoreRefused, ReplicateBlocks, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_scheduling.commands import Send
from halfmoon_scheduling.conductor.journal import JournalEntry, read_journal, replay_journal
from halfmoon_scheduling.conductor.kvstore_directory import REFUSED_COPY_S
from halfmoon_scheduling.events import MessageReceived
from halfmoon_testing.block_client import BlockClient

pytestmark = pytest.mark.e2e

#: Blocks of 1.25 MiB.
MODEL = "fake://wide?layers=5&kv_heads=8&head_dim=64"
PROMPT = list(range(300))


def start_kvstore(live: Any, name: str, *flags: str) -> None:
    """One more kvstore, with flags of its own."""
    words = ("--worker-id", name, "--metadata", live.metadata_url, *flags)
    spec = ProcessSpec(name, "kvstore", words)
    live.cluster.processes[name] = ServiceProcess(spec, live.cluster.folder)
    live.until(lambda: name in live.live())


async def stored(live: Any, names: Sequence[str]) -> list[set[BlockHash]]:
    """What kvstores say they hold."""
    store = open_store(live.metadata_url)
    network = ZmqNetwork()
    found = []
    try:
        for name in names:
            record = store.get(MEMBERS + name)
            assert record is not None, live.logs()
            info = msgspec.json.decode(record, type=WorkerInfo)
            async with await BlockClient.dial(network, store, info, f"reader of {name}") as client:
                found.append(await client.stored())
    finally:
        await network.close()
        store.close()
    return found


def entries_of(path: Path) -> list[JournalEntry]:
    with path.open("rb") as source:
        return list(read_journal(source)[1])


async def test_a_hot_prefix_is_copied_to_who_takes_it_and_the_copy_goes_when_it_is_cold(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "conductor.journal"
    flags = ["--journal-path", str(path), "--replication-bytes-per-s", "1e9"]
    flags += ["--replication-hot-uses", "4", "--replication-half-life-s", "1.5"]
    oracle = FakeEngine(parse_fake_spec(MODEL), block_size=64).expected(PROMPT, 3)
    expected = "".join(f" t{token}" for token in oracle)
    with (
        start_cluster(MODEL, n_kvstore=1, extra={"conductor": flags}) as live,
        ThreadPoolExecutor(8) as clients,
    ):
        start_kvstore(live, "kvstore-1", "--capacity-mib", "1")  # not even a block fits
        start_kvstore(live, "kvstore-2")

        def ask(_: int) -> str:
            answer = live.complete(prompt=PROMPT, max_tokens=3, temperature=0)
            return str(answer["choices"][0]["text"])

        prefix: set[BlockHash] = set()
        for _ in range(60):
            assert set(clients.map(ask, range(8))) == {expected}
            prefix, of_the_copy = await stored(live, ["kvstore-0", "kvstore-2"])
            if of_the_copy:
                break
        assert len(prefix) == 4  # full blocks of 300 tokens
        assert of_the_copy == prefix, live.logs()

        for _ in range(2000):  # nobody asks any more
            (of_the_copy,) = await stored(live, ["kvstore-2"])
            if not of_the_copy:
                break
        assert not of_the_copy, live.logs()
        assert await stored(live, ["kvstore-0", "kvstore-1"]) == [prefix, set()]
        assert ask(0) == expected

    entries = entries_of(path)
    asked = [
        (entry.now, command.worker_id)
        for entry in entries
        for command in entry.commands
        if isinstance(command, Send) and isinstance(command.message, ReplicateBlocks)
    ]
    refused = [
        (entry.now, entry.event.worker_id)
        for entry in entries
        if isinstance(entry.event, MessageReceived)
        and isinstance(entry.event.message, KvstoreRefused)
    ]
    assert {worker_id for _, worker_id in refused} == {"kvstore-1"}
    for no_s, worker_id in refused:
        too_soon = [s for s, who in asked if who == worker_id and no_s < s < no_s + REFUSED_COPY_S]
        assert not too_soon
    with path.open("rb") as source:
        assert replay_journal(source) == (len(entries), None)
