"""Clusters of real processes whose workers have engines of their own, each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfmoon_cli.up.embedded_cluster import (
    ClusterPlan,
    EmbeddedCluster,
    ServiceProcess,
    plan_processes,
)
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.conftest import LiveCluster
from tests.vllm import stock_server
from tests.vllm.conftest import BLOCK_SIZE

#: Eight processes that import vLLM at once take minutes on a busy machine.
READY_WITHIN_S = 400.0
TORCH = ("--engine=torch",)
VLLM = ("--engine=vllm", '--engine-options={"enforce_eager": "true"}')
TWO_RANKS = (
    "--engine=vllm",
    '--engine-options={"enforce_eager": "true", "tensor_parallel_size": "2"}',
)
_FLAGS = (f"--block-size={BLOCK_SIZE}", "--dtype=float32", "--pool-mib=16", "--measure=false")


class MixedCluster(EmbeddedCluster):
    """A cluster with further flags for workers by their names."""

    def __init__(self, plan: ClusterPlan, folder: Path, flags: Mapping[str, Sequence[str]]) -> None:
        super().__init__(plan, folder)
        self._flags = flags

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for spec in plan_processes(self.plan):
            own = replace(spec, arguments=(*spec.arguments, *self._flags.get(spec.name, ())))
            self.processes[spec.name] = ServiceProcess(own, self.folder)

    def add(self, role: str, flags: Sequence[str]) -> str:
        """Start one more worker of a role; return its name."""
        first = next(spec for spec in plan_processes(self.plan) if spec.role == role)
        name = f"{role}-{sum(process.spec.role == role for process in self.processes.values())}"
        flags = (*first.arguments, f"--worker-id={name}", *flags)
        spec = replace(first, name=name, arguments=tuple(flags))
        self.processes[name] = ServiceProcess(spec, self.folder)
        return name


@contextmanager
def mixed_cluster(
    folder: Path, model: Path, flags: Mapping[str, Sequence[str]]
) -> Iterator[LiveCluster]:
    """Start workers named in `flags`, with these; wait until all are in service."""
    plan = ClusterPlan(
        model=str(model),
        http_port=free_port(),
        n_prefill=sum(name.startswith("prefill") for name in flags),
        n_decode=sum(name.startswith("decode") for name in flags),
        threads={"prefill": 1, "decode": 1},
        extra={"conductor": ["--placement=load_balance"], "prefill": _FLAGS, "decode": _FLAGS},
        limits={"max-queue-s": "600"},
    )
    with MixedCluster(plan, folder, flags) as cluster:
        live = LiveCluster(cluster)

        def ready() -> bool:
            assert not cluster.dead(), live.logs()
            return cluster.ready()

        live.until(ready, READY_WITHIN_S)
        live.until(lambda: len(live.live()) == len(flags) + 1)
        yield live


def join(cluster: LiveCluster, role: str, flags: Sequence[str]) -> str:
    """Add a worker and wait until it is in service; return its name."""
    assert isinstance(cluster.cluster, MixedCluster)
    name = cluster.cluster.add(role, flags)

    def joined() -> bool:
        assert cluster.process(name).exit_code is None, cluster.logs()
        return name in cluster.live()

    cluster.until(joined, READY_WITHIN_S)
    return name


def complete(cluster: LiveCluster, prompt: Sequence[int], n: int, **more: Any) -> dict[str, Any]:
    """Complete a prompt of tokens; the answer's only choice, with its `usage`."""
    found = stock_server.complete(cluster.url, prompt, n, model=cluster.model, **more)
    return {**found["choices"][0], "usage": found["usage"]}
