"""A conductor whose loop stands still for longer than leases and heartbeats last."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from halfmoon_runtime.membership import LEASE_S
from tests.e2e.conftest import StartCluster

pytestmark = pytest.mark.e2e

#: Longer than a lease, and than it takes to fill a socket's queue and miss heartbeats.
STALL_S = LEASE_S + 6
MODEL = "fake://tiny?max_context=100000&step_s=0.02"
N_NEW = 1000
#: What Python imports at its start.
STALLING = f"""
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep({STALL_S}))
"""


@pytest.mark.usefixtures("started_programs")  # one that is forked has imported everything
def test_no_worker_is_lost_while_the_conductor_stands_still(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALLING)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"n_decode": 2, "n_kvstore": 0, "environment": {"PYTHONPATH": os.pathsep.join(paths)}}
    oracle = FakeEngine(parse_fake_spec(MODEL), block_size=64)
    prompts = [[number, 7, 9] for number in range(4)]
    with start_cluster(MODEL, **more) as cluster, ThreadPoolExecutor(4) as clients:
        used: set[str] = set()
        while len(used) < 2:  # prefill looks up both: the store that knows them will be away too
            list(clients.map(lambda prompt: cluster.ask(prompt, 40), prompts))
            used = {each["placement"]["decode"] for each in cluster.decisions()}
        streams = [clients.submit(cluster.stream, prompt, N_NEW) for prompt in prompts]
        cluster.until(lambda: cluster.get("/load")["server_load"] >= 4)
        conductor = cluster.process("conductor-0")
        conductor.signal(signal.SIGUSR1)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result() == oracle.expected(prompt, N_NEW)
        told = conductor.log_path.read_text()
    assert "worker_joined" in told
    assert "worker_lost" not in told
    assert "request_retried" not in told
