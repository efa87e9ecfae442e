"""What several of these tests need: a worker's record, a service, waits, and counts of drops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_runtime.lifecycle import Service

ADDRESS = "tcp://127.0.0.1:1"


def info_of(name: str = "decode-0", **fields: Any) -> WorkerInfo:
    """The record of a worker, whose name begins with its role."""
    usual = {"generation": 1, "host": "here", "commands": ADDRESS, "events": ADDRESS}
    role: Any = name.partition("-")[0]
    return WorkerInfo(worker_id=WorkerId(name), **{"role": role, **usual, **fields})


@asynccontextmanager
async def some_service() -> AsyncIterator[Service]:
    async with asyncio.TaskGroup() as tasks:
        yield Service(tasks)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def dropped(reason: str) -> float:
    return REGISTRY.get_sample_value("halfmoon_dropped_messages_total", {"reason": reason}) or 0.0


async def is_unreachable(call: Awaitable[object], why: str | None = None) -> None:
    """Wait for a call whose other end is gone."""
    with pytest.raises(PeerUnreachable, match=why):
        await call
