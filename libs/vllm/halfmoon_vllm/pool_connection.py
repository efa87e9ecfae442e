"""Open what a server needs to reach the pool: metadata store, transfer engine, kvstores, staging.

The server serves before all of this is there, and without it: then it computes what it could have
loaded.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from halfmoon_metadata import MetadataError, MetadataStore, open_store
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.settings import machine_id
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.open_transfer_engine import open_transfer_engine
from halfmoon_vllm.block_staging import BlockStaging
from halfmoon_vllm.connector_settings import ConnectorSettings

log = logging.getLogger("vllm.halfmoon")

_RETRY_S = 1.0


@dataclass(frozen=True)
class PoolConnection:
    """Open connections to the pool."""

    transfer: TransferEngine
    replicas: ReplicaSelector
    staging: BlockStaging


@asynccontextmanager
async def open_pool(settings: ConnectorSettings, layout: KvLayout) -> AsyncIterator[PoolConnection]:
    """Connect to the pool; wait for the metadata server without limit.

    Raises:
        OSError: an address of the settings can't be listened on.
        ValueError: not one block fits into the staging memory.
    """
    async with AsyncExitStack() as stack:
        store = open_store(
            settings.metadata,
            cluster_key=settings.cluster_key,
            tls_ca=settings.tls_ca,
            cluster=settings.cluster,
        )
        stack.callback(store.close)
        transfer = await _open_transfer(settings, store)
        stack.callback(transfer.close)
        network = ZmqNetwork(
            advertise_host=settings.advertise_host or settings.host,
            cluster_key=settings.cluster_key,
        )
        stack.push_async_callback(network.close)
        kvstores = KvstoreClients(network, settings.kvstore_timeout_s)
        stack.push_async_callback(kvstores.close)
        n_pages = settings.staging_mib * 1024 * 1024 // layout.block_bytes
        memory = await asyncio.to_thread(transfer.allocate, n_pages * layout.block_bytes)
        replicas = ReplicaSelector(kvstores, layout, SystemClock())
        yield PoolConnection(transfer, replicas, BlockStaging(memory, layout))


async def _open_transfer(settings: ConnectorSettings, store: MetadataStore) -> TransferEngine:
    """Open a segment with a name of its own: no start of a server goes on where another ended."""
    name = f"vllm-{socket.gethostname()[:64]}-{secrets.token_hex(8)}"
    advertise = [settings.advertise_host] if settings.advertise_host else settings.transfer_bind
    failures = 0
    while True:
        try:
            transfer = await asyncio.to_thread(
                open_transfer_engine,
                name,
                metadata=store,
                generation=1,
                backends=settings.transfer_paths,
                bind=settings.transfer_bind,
                advertise=advertise,
                host_id=settings.host_id or machine_id(),
                cluster_key=settings.cluster_key,
                encryption=settings.encryption,
            )
        except MetadataError as error:
            if not failures:
                log.warning(
                    "the metadata server is away: serving without the pool until it is there: %s",
                    error,
                )
            failures += 1
            await asyncio.sleep(_RETRY_S)
        else:
            return transfer
