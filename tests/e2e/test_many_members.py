"""A conductor serves on beside hundreds of members, half of which it can't reach."""

import os
import subprocess
import sys

import pytest

from tests.e2e.conftest import StartCluster

pytestmark = pytest.mark.e2e

#: Members that answer, and as many that do not. libzmq's own limit would be met by 170 links.
N_MEMBERS = int(os.environ.get("HALFMOON_MEMBERS", "250"))

#: Registers kvstores: the first answer their hellos, the others' ports take no connection.
MEMBERS = """
import asyncio, resource, sys
import msgspec
from halfmoon_metadata import open_store
from halfmoon_protocol.messages import Hello, Welcome
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_testing.scheduling_inputs import a_worker

async def serve(port, info):
    while True:
        peer, message = await port.receive()
        if isinstance(message, Hello):
            await port.send(peer, Welcome(worker=info))

async def main(url, n):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    network, store, serving = ZmqNetwork(), open_store(url), []
    gone = await network.bind("gone")
    await gone.close()
    for i in range(2 * n):
        port = await network.bind(f"kvstore-x{i}") if i < n else gone
        info = a_worker(f"kvstore-x{i}")
        info = msgspec.structs.replace(info, commands=port.commands, events=port.events)
        if i < n:
            serving.append(asyncio.create_task(serve(port, info)))
        record = msgspec.json.encode(info)
        await asyncio.to_thread(store.put, MEMBERS + info.worker_id, record, ttl_s=600)
    print("registered", flush=True)
    await asyncio.gather(*serving)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_service_goes_on_beside_members_of_whom_half_can_not_be_reached(
    start_cluster: StartCluster,
) -> None:
    with start_cluster("fake://tiny", n_prefill=1, n_decode=1, n_kvstore=1) as cluster:
        first = cluster.ask([1, 2, 3], 5)[0]
        members = subprocess.Popen(
            [sys.executable, "-c", MEMBERS, cluster.metadata_url, str(N_MEMBERS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert members.stdout is not None
            assert "registered\n" in members.stdout  # which may log before
            cluster.until(lambda: cluster.metrics()["halfmoon_workers"] == N_MEMBERS + 3)
            cluster.until(lambda: cluster.metrics()["halfmoon_unreachable_workers"] == N_MEMBERS)
            assert cluster.ask([1, 2, 3], 5)[0] == first
        finally:
            members.kill()
            members.wait()
        cluster.until(lambda: cluster.metrics()["halfmoon_workers"] == 3)
        assert cluster.ask([1, 2, 3], 5)[0] == first
