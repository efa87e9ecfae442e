"""Ranks of a worker that are killed, and workers with ranks that are: no lost token, no leak."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from halfmoon_cli.up.embedded_cluster import ServiceProcess
from tests.e2e.conftest import LiveCluster
from tests.vllm.conftest import prompt_of
from tests.vllm.mixed_cluster import (
    READY_WITHIN_S,
    TORCH,
    TWO_RANKS,
    join,
    mixed_cluster,
)
from tests.vllm.stock_server import streamed

pytestmark = pytest.mark.e2e

Reference = Callable[[str, Sequence[int], int], list[int]]
MEMBERS = "halfmoon/members/"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, model_of: Callable[[str], Path]
) -> Iterator[LiveCluster]:
    flags = {"prefill-0": TWO_RANKS, "decode-0": TWO_RANKS}
    with mixed_cluster(tmp_path_factory.mktemp("ranks"), model_of("llama"), flags) as live:
        yield live


class Ranks:
    """The processes of a worker's ranks, and what they have open."""

    def __init__(self, worker: ServiceProcess) -> None:
        self.worker = worker
        below = psutil.Process(worker.pid).children(recursive=True)
        self.processes = [each for each in below if "Worker" in " ".join(each.cmdline())]
        assert len(self.processes) == 2, [each.cmdline() for each in below]
        self.helpers = below
        maps = "".join(Path(f"/proc/{each.pid}/maps").read_text() for each in self.processes)
        self.files = {Path(path) for path in re.findall(r"(/dev/shm/\S+)(?: \(deleted\))?$", maps)}

    def kill_one(self) -> None:
        os.kill(self.processes[1].pid, signal.SIGKILL)

    def check_end(self, cluster: LiveCluster, exit_code: int) -> None:
        """Check that worker, ranks, their files and the worker's lease are gone."""
        cluster.until(lambda: self.worker.exit_code is not None)
        assert self.worker.exit_code == exit_code, self.worker.last_lines(50)
        cluster.until(lambda: not any(each.is_running() for each in self.helpers))
        assert not [path for path in self.files if path.exists()]
        if exit_code == 1:
            address, query = cluster.metadata_url, {"prefix": MEMBERS}
            name = self.worker.spec.name
            assert MEMBERS + name not in httpx.get(address, params=query, timeout=10).json()
            log = self.worker.log_path.read_text()
            assert f"the rank of process {self.processes[1].pid} ended" in log, log
            # The other rank may say by itself, through vLLM's log, that its peer is gone.
            own = [line for line in log.splitlines() if not line.startswith("(Worker_TP")]
            assert not [line for line in own if "Traceback" in line], log


def test_a_rank_killed_in_a_decode_costs_no_token(
    cluster: LiveCluster, reference: Reference
) -> None:
    ranks = Ranks(cluster.process("decode-0"))
    # One answer at a time, so that another one goes to the ranks.
    join(cluster, "decode", (*TORCH, "--max-running=1"))
    _decode_through(cluster, ranks.kill_one, reference)
    ranks.check_end(cluster, 1)


def test_a_killed_worker_takes_its_ranks_along(cluster: LiveCluster, reference: Reference) -> None:
    cluster.cluster.restart("decode-0")
    cluster.until(lambda: "decode-0" in cluster.live(), READY_WITHIN_S)
    ranks = Ranks(cluster.process("decode-0"))
    _decode_through(cluster, lambda: ranks.worker.signal(signal.SIGKILL), reference)
    ranks.check_end(cluster, -signal.SIGKILL)


def _decode_through(cluster: LiveCluster, fault: Callable[[], None], reference: Reference) -> None:
    """Decode two answers, with a fault once both are under way."""
    prompts = [prompt_of(40, seed) for seed in range(2)]
    seen: list[list[int]] = [[] for _ in prompts]

    def ask(number: int) -> None:
        for part in streamed(cluster.url, prompts[number], 400, model=cluster.model):
            seen[number] += part

    n_before = len(cluster.decisions())
    with ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(ask, number) for number in range(len(prompts))]
        cluster.until(lambda: all(len(tokens) >= 5 for tokens in seen))
        fault()
        for each in asked:
            each.result()
    assert len(cluster.decisions()) > n_before + len(prompts)
    assert seen == [reference("llama", prompt, 400) for prompt in prompts]
