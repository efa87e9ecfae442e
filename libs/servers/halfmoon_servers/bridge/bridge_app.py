"""Build a bridge: metadata, network, one supervisor for each server. Close them in reverse."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from halfmoon_metadata import open_store
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.cluster_claim import ClusterClaim
from halfmoon_runtime.lifecycle import Service, cannot_start_on
from halfmoon_runtime.observability.metrics import expose_metrics
from halfmoon_servers.bridge.bridge_metrics import bridge_metrics
from halfmoon_servers.bridge.bridge_settings import BridgeSettings
from halfmoon_servers.bridge.pair_releaser import PairReleaser
from halfmoon_servers.bridge.server_supervisor import ServerSupervisor
from halfmoon_servers.client.server_client import ClientLimits, ServerClient
from halfmoon_servers.kv_events.server_salts import ServerSalts


async def run(settings: BridgeSettings, service: Service) -> None:
    """Bridge servers until told to stop, then let their requests finish."""
    async with AsyncExitStack() as stack:
        cluster_key = settings.cluster_key.get_secret_value()
        with cannot_start_on(OSError):
            advertised = settings.advertised_host
        with cannot_start_on(ValueError):
            store = open_store(
                settings.metadata,
                cluster_key=cluster_key,
                tls_ca=settings.tls_ca,
                cluster=settings.cluster,
            )
        stack.callback(store.close)
        claim = ClusterClaim(store, cluster_key, settings.metadata)
        await claim.take()
        await stack.enter_async_context(service.running(claim.keep()))
        network = ZmqNetwork(
            advertise_host=advertised,
            cluster_key=cluster_key,
        )
        stack.push_async_callback(network.close)
        salts, releaser = ServerSalts(), PairReleaser()
        supervisors: list[ServerSupervisor] = []
        limits = ClientLimits(idle_timeout_s=settings.stall_s, status_timeout_s=settings.answer_s)
        key = settings.server_api_key.get_secret_value() or None
        for i, target in enumerate(settings.servers):
            client = ServerClient(target.url, api_key=key, limits=limits)
            stack.push_async_callback(client.close)
            supervisors.append(
                ServerSupervisor(
                    f"server-{i}",
                    target,
                    client,
                    salts,
                    releaser,
                    host_id=settings.host_id,
                    host=settings.host,
                    block_size=settings.block_size,
                )
            )
        stack.callback(expose_metrics(lambda: bridge_metrics(supervisors)))
        for supervisor in supervisors:
            await stack.enter_async_context(service.running(supervisor.run(network, store)))
        service.ready()
        service.report_stage("ready", worker_id=settings.worker_id, servers=len(supervisors))
        await service.stopping.wait()
        service.report_stage("draining", worker_id=settings.worker_id)
        await _drain(supervisors, settings.drain_s)


async def _drain(supervisors: Sequence[ServerSupervisor], limit_s: float) -> None:
    """Take no new requests, and let the present ones finish."""
    sessions = [supervisor.session for supervisor in supervisors if supervisor.session is not None]
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*(session.drain() for session in sessions))
