"""A server that tests script, with a client of it."""

from collections.abc import AsyncGenerator

import pytest

from halfmoon_servers.client.server_client import ClientLimits, ServerClient
from tests.servers.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
async def server() -> AsyncGenerator[ScriptedServer, None]:
    limits = ClientLimits(max_event_bytes=10_000, max_body_bytes=100_000)
    async with scripted_server() as script, ServerClient(script.url, limits=limits) as client:
        script.client = client
        yield script
