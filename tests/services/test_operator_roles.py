"""An operator changes roles through a conductor's HTTP port, and by `halfmoon roles`."""

import asyncio
import itertools
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata import open_store
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.lifecycle import Service
from halfmoon_workers.roles.role_settings import FlexibleDecodeSettings
from halfmoon_workers.roles.worker_process import run_worker

ORACLE = FakeEngine()
FLEXIBLE = "decode-9"
_stores = itertools.count()


class Operator:
    """Uses a conductor by HTTP and by command."""

    def __init__(self, cluster: Any, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.client = client

    async def row(self) -> dict[str, Any]:
        """Return what is shown of the worker that can change."""
        rows = (await self.client.get("/debug/roles")).json()["workers"]
        (found,) = [each for each in rows if each["worker_id"] == FLEXIBLE]
        assert isinstance(found, dict)
        return found

    async def set_role(self, role: str) -> httpx.Response:
        return await self.client.post(f"/debug/roles/{FLEXIBLE}", json={"role": role})

    async def until_it_takes(self, role: str) -> None:
        """Wait until the worker takes requests in this role."""
        cluster = self.cluster.core.cluster
        await self.cluster.until(
            lambda: FLEXIBLE in {info.worker_id for info in cluster.accepting(role)}
        )

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run `halfmoon roles`; return status, output and errors."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "halfmoon_cli", "roles"),
            *("--url", str(self.client.base_url), *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode(), errors.decode()


@asynccontextmanager
async def operated_cluster(
    local_cluster: Callable[..., Any], *, n_decode: int = 1
) -> AsyncIterator[Operator]:
    """Run a cluster with one worker that can have both roles, and serve `/debug` over TCP."""
    store = f"memory://operator-roles-{next(_stores)}"
    settings = FlexibleDecodeSettings(
        worker_id=FLEXIBLE,
        model="fake://fake",
        roles="prefill,decode",
        role_cooldown_s=0.0,
        served_model_name="m",
        block_size=ORACLE.layout.block_size,
        pool_mib=8,
        metadata=store,
        transfer_backends="memory",
        measure=False,
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            local_cluster(
                FakeEngine, n_decode=n_decode, network=ZmqNetwork(), store=open_store(store)
            )
        )
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        service = Service(tasks)
        stack.callback(service.stopping.set)
        tasks.create_task(run_worker(settings, service, "decode"))
        observer = CoreObserver(cluster.core, LatencyHistory())
        debug = debug_app(observer, cluster.hub, cluster.clock, ConductorInfo("conductor-0"))
        server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=[Mount("/debug", debug)]), log_config=None, lifespan="off"
            )
        )
        tasks.create_task(server.serve(sockets=[listener]))
        stack.callback(setattr, server, "should_exit", True)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30.0))
        operator = Operator(cluster, client)
        await operator.until_it_takes("decode")
        yield operator


async def test_a_worker_changes_there_and_back_by_http(local_cluster: Callable[..., Any]) -> None:
    async with operated_cluster(local_cluster) as operator:
        answer = await operator.set_role("prefill")
        assert answer.status_code == 200, answer.text
        assert answer.json()["worker"]["changing_to"] == "prefill"
        await operator.until_it_takes("prefill")
        row = await operator.row()
        assert (row["role"], row["pinned"], row["changing_to"]) == ("prefill", "prefill", None)
        prompt = [i % 900 for i in range(100)]
        assert await operator.cluster.generate(prompt, 8) == ORACLE.expected(prompt, 8)
        assert (await operator.set_role("decode")).status_code == 200
        await operator.until_it_takes("decode")


async def test_the_last_worker_of_a_role_is_refused_by_http_and_by_command(
    local_cluster: Callable[..., Any],
) -> None:
    async with operated_cluster(local_cluster, n_decode=0) as operator:
        refused = await operator.set_role("prefill")
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "role")
        status, _, errors = await operator.run("set", FLEXIBLE, "prefill")
        assert status == 1 and "the last decode worker" in errors and "(409)" in errors
        assert (await operator.row())["pinned"] is None


async def test_a_worker_changes_by_command_and_keeps_its_role_when_it_is_released(
    local_cluster: Callable[..., Any],
) -> None:
    async with operated_cluster(local_cluster) as operator:
        status, output, errors = await operator.run("set", FLEXIBLE, "prefill")
        assert status == 0, errors
        assert f"{FLEXIBLE} is pinned to prefill" in output and f"set {FLEXIBLE} auto" in output
        await operator.until_it_takes("prefill")
        status, output, _ = await operator.run()
        (line,) = [line for line in output.splitlines() if line.startswith(f"{FLEXIBLE} ")]
        assert line.split()[:5] == [FLEXIBLE, "prefill", "prefill,", "decode", "prefill"]
        assert "role_changes is off" in output
        status, _, errors = await operator.run("set", "decode-7", "prefill")
        assert status == 1 and "'decode-7'" in errors and "--url" not in errors
        status, output, _ = await operator.run("set", FLEXIBLE, "auto", "--json")
        row = json.loads(output)["worker"]
        assert (row["role"], row["pinned"]) == ("prefill", None)
