"""Serve with a built worker until its process is stopped, or its role is to change; drain it."""

import asyncio
from contextlib import AsyncExitStack
from typing import Protocol

import msgspec
import structlog

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.worker.open_worker import GreetedWorker, OpenedWorker
from halfmoon_transfer.engine import TransferEngine
from halfmoon_workers.start.worker_start import BuiltWorker, WorkerStart

log = structlog.get_logger()


class DrainableWorker(GreetedWorker, Protocol):
    """A worker that finishes what it holds."""

    async def drain(self, info: WorkerInfo, limit_s: float) -> None:
        """Announce this record, and finish all requests, or give up after so many seconds."""
        ...


async def serve_worker(
    opened: OpenedWorker[TransferEngine],
    start: WorkerStart,
    built: BuiltWorker[DrainableWorker],
    drain_s: float,
) -> None:
    """Register a worker, serve until it is stopped or to change its role, and drain it.

    Args:
        opened: the start in its process.
        start: its parts.
        built: of these parts.
        drain_s: seconds after which requests are given up.

    Raises:
        Superseded: a later start of this worker is registered.
    """
    info, worker = built.info, built.worker
    membership = start.env.membership(info)
    named = {"role": info.role, "generation": info.generation} if info.roles else {}
    async with AsyncExitStack() as stack:
        for run in built.beside:
            await stack.enter_async_context(opened.service.running(run()))
        await opened.serve(
            worker,
            membership,
            lambda: worker.drain(msgspec.structs.replace(info, draining=True), drain_s),
            start.switch.metrics,
            *built.metrics,
            until=lambda: _until_leaving(opened, start, membership),
            n_pages=start.placed.n_pages,
            kv_tokens=start.placed.n_pages * start.engine.layout.block_size,
            max_context=start.engine.max_context,
            token_bytes=start.engine.layout.token_bytes,
            dtype=start.engine.layout.dtype,
            **named,
        )


async def _until_leaving(
    opened: OpenedWorker[TransferEngine], start: WorkerStart, membership: Membership
) -> None:
    """Wait for the signal to stop, or for a change of role that the cluster can afford."""
    start.switch.on_serving()
    stopped = asyncio.create_task(opened.service.stopping.wait())
    wanted = asyncio.create_task(until_spared(start, membership))
    try:
        done, _ = await asyncio.wait({stopped, wanted}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (stopped, wanted):
            task.cancel()
        await asyncio.wait((stopped, wanted))  # a cancellation of this wait is not lost


async def until_spared(start: WorkerStart, membership: Membership) -> None:
    """Wait for a change of role while another worker of the present role takes requests.

    Each worker announces that it leaves before it looks for another one. So of two that are
    told to leave at once, at most both stay.
    """
    info = membership.info
    while True:
        role = await start.switch.wait()
        await membership.update(msgspec.structs.replace(info, draining=True))
        try:
            others = await start.env.members()
        except MetadataError as error:
            refusal = f"the metadata server can't be asked for other workers: {error}"
        else:
            if any(_replaces(info, other) for other in others):
                return
            refusal = f"it is the last {info.role} worker, so none would be left"
        await membership.update(info)
        start.switch.withdraw(refusal)
        log.info("role_kept", role=info.role, wanted=role)


def _replaces(info: WorkerInfo, other: WorkerInfo) -> bool:
    """Return whether another worker takes requests in the same role."""
    return (
        other.worker_id != info.worker_id
        and other.role == info.role
        and not other.draining
        and not other.server
    )
