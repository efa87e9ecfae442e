"""A client of the transfer wire in C reads a block from a kvstore of ours."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata import open_store
from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.messages import (
    BlocksLeased,
    LeaseBlocks,
    WorkerInfo,
)
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_testing.block_client import BlockClient, block_content, prompt_blocks
from tests.installed_programs import needs_programs

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "polyglot" / "read_block.c"
N_LINES = 100

pytestmark = [
    pytest.mark.e2e,
    needs_programs("cc"),
    pytest.mark.skipif(
        not Path("/usr/include/xxhash.h").exists(), reason="xxhash.h is not here (libxxhash-dev)"
    ),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program."""
    program = tmp_path_factory.mktemp("reader") / "read_block"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", program, SOURCE, "-lxxhash"], check=True)
    return program


@pytest.fixture
def kvstore(metadata_url: str, tmp_path: Path) -> Iterator[WorkerInfo]:
    flags = ("--metadata", metadata_url, "--metrics-port", "-1", "--capacity-mib", "8")
    spec = ProcessSpec("kvstore-0", "kvstore", ("--worker-id", "kvstore-0", *flags))
    process = ServiceProcess(spec, tmp_path)
    deadline = time.monotonic() + 60
    while process.stage != "ready":
        assert process.exit_code is None and time.monotonic() < deadline, process.last_lines()
        time.sleep(0.02)
    store = open_store(metadata_url)
    record = store.get(MEMBERS + "kvstore-0")
    store.close()
    assert record is not None
    yield msgspec.json.decode(record, type=WorkerInfo)
    process.signal(signal.SIGKILL)
    process.wait(10)


def read(reader: Path, *arguments: object) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([reader, *map(str, arguments)], capture_output=True, timeout=30)


async def test_a_client_in_c_reads_leased_blocks_and_is_told_why_not(
    reader: Path, kvstore: WorkerInfo, metadata_url: str
) -> None:
    assert len(SOURCE.read_text().splitlines()) <= N_LINES
    network, store = ZmqNetwork(), open_store(metadata_url)
    blocks = prompt_blocks(1, 3)
    async with await BlockClient.dial(network, store, kvstore, "writer") as client:
        await client.put(blocks)
        lease = LeaseBlocks(Ticket("lease"), client.layout, tuple(blocks))
        leased = await client.request(lease)
        assert isinstance(leased, BlocksLeased)
        segment = json.loads(store.get(f"halfmoon/segments/{kvstore.worker_id}") or b"")
        host, port = segment["endpoints"]["tcp"]["address"].rsplit(":", 1)
        region, n_bytes = leased.region, client.layout.block_bytes
        where = (host, port, region.segment, region.generation, region.key.hex())
        for place in leased.places:
            got = await asyncio.to_thread(read, reader, *where, place.offset, n_bytes)
            assert got.stdout == block_content(place.hash, n_bytes), got.stderr
        beyond = await asyncio.to_thread(read, reader, *where, region.length, n_bytes)
        assert (beyond.returncode, beyond.stderr) == (2, b"status 1\n")
        wrong = await asyncio.to_thread(read, reader, *where[:2], "kvstore-1", *where[3:], 0, 16)
        assert b"refused" in wrong.stderr
    await network.close()
    store.close()
