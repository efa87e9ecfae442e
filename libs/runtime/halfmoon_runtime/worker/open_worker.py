"""Open what every worker needs, in order, and close it in reverse.

    metadata store → its cluster → network → name → generation
        → transfer engine → port                                          `open_worker`
        the service opens its own parts and builds its worker             `build_kvstore` and others
    serving loop → record in the metadata server → lease renewal          `OpenedWorker.serve`

This library imports no transfer engine: each service hands in the function that opens one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec

from halfmoon_metadata import MetadataStore, open_store
from halfmoon_metadata.start_counter import ImplausibleGeneration
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Role
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.cluster_claim import ClusterClaim
from halfmoon_runtime.lifecycle import CannotStart, Service, cannot_start_on
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.transfer_metrics import transfer_engine_metrics
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_runtime.worker.conductor_watch import ConductorWatch
from halfmoon_runtime.worker.name_check import check_name
from halfmoon_runtime.worker.registration import ServableWorker, registered_worker
from halfmoon_runtime.worker.worker_env import (
    EngineT,
    UsedTransferEngine,
    WorkerEnv,
    open_env,
)


class GreetedWorker(ServableWorker, Protocol):
    """A worker that counts its conductors."""

    @property
    def n_conductors(self) -> int:
        """Conductors that are connected to it."""
        ...


OpenedT = TypeVar("OpenedT", bound=UsedTransferEngine, covariant=True)


class TransferOpener(Protocol[OpenedT]):
    """Open a transfer engine for one start of a worker."""

    def __call__(
        self,
        name: str,
        *,
        metadata: MetadataStore,
        generation: int,
        backends: Sequence[str],
        bind: Sequence[str],
        advertise: Sequence[str],
        host_id: str,
        cluster_key: str,
        encryption: bool,
    ) -> AbstractContextManager[OpenedT]:
        """Open it under this name; closing the context manager closes the engine."""
        ...


@dataclass(frozen=True)
class OpenedWorker(Generic[EngineT]):
    """One start of a worker in a service's process, not yet known to the cluster."""

    service: Service
    env: WorkerEnv[EngineT]

    async def serve(
        self,
        worker: GreetedWorker,
        membership: Membership,
        drain: Callable[[], Awaitable[None]],
        *metrics: Callable[[], MetricSnapshot],
        until: Callable[[], Awaitable[None]] | None = None,
        **ready: object,
    ) -> None:
        """Register the worker and serve until the service is told to stop, then drain it.

        Args:
            worker: answers commands, and has metrics.
            membership: its record in the metadata server.
            drain: finishes or moves what the worker holds; the worker still answers meanwhile.
            metrics: further metrics to expose, besides those of worker, record and transfers.
            until: returns when the worker is to leave; None: when the service is told to stop.
            ready: fields to log when the worker is ready.

        Raises:
            Superseded: a later start of this worker is registered.
        """
        worker_id = membership.info.worker_id
        transfers = transfer_engine_metrics(self.env.transfer.stats)
        service = self.service
        watch = ConductorWatch(
            self.env.store,
            membership.info,
            lambda: worker.n_conductors,
            service.report_problem,
            asyncio.get_running_loop().time,
        )
        async with registered_worker(
            worker, membership, service, transfers, watch.metrics, *metrics
        ):
            service.report_stage("ready", worker_id=worker_id, **ready)
            async with service.running(watch.run()):
                await (until or service.stopping.wait)()
            service.report_problem("")
            self.service.report_stage("draining", worker_id=worker_id)
            await drain()


@asynccontextmanager
async def open_worker(
    settings: ServiceSettings,
    service: Service,
    role: Role,
    open_transfer: TransferOpener[EngineT],
    *,
    above: int = 0,
) -> AsyncIterator[OpenedWorker[EngineT]]:
    """Open one start of a worker; close all of it, in reverse, at the end of the block.

    Load what takes long before: the new generation supersedes an earlier start of this worker.

    Args:
        settings: names of the worker and its servers, and its addresses.
        service: the worker's process.
        role: what the worker does in this start.
        open_transfer: opens the transfer engine.
        above: generation of an earlier start in this process; the new one is higher.

    Raises:
        CannotStart: the metadata store is unknown, holds another cluster or another worker of this
            name that lives, or this worker's record there makes no sense; or this machine's name
            does not resolve, and no address is named in its place.
        OSError: an address of the settings can't be listened on, or dialled by others.
        ValueError: the settings name an unknown transfer backend.
    """
    async with AsyncExitStack() as stack:
        worker_id = WorkerId(settings.worker_id)
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
        network = ZmqNetwork(advertise_host=advertised, cluster_key=cluster_key)
        stack.push_async_callback(network.close)
        if not above:
            await check_name(store, network, worker_id)

        async def opened_transfer(generation: int) -> EngineT:
            transfer = open_transfer(
                worker_id,
                metadata=store,
                generation=generation,
                backends=settings.transfer_paths,
                bind=settings.transfer_bind,
                advertise=settings.transfer_advertise,
                host_id=settings.host_id,
                cluster_key=cluster_key,
                encryption=settings.transfer_encryption == "on",
            )
            return stack.enter_context(transfer)

        try:
            env = await open_env(
                worker_id,
                role,
                store,
                network,
                opened_transfer,
                host_id=settings.host_id,
                host=settings.host,
                above=above,
            )
        except ImplausibleGeneration as error:
            raise CannotStart(str(error)) from error
        if service.http is not None:
            info = msgspec.structs.replace(env.info, http=service.http.url(advertised))
            env = replace(env, info=info)
        yield OpenedWorker(service, env)
