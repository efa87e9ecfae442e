"""What all tests share: how hypothesis behaves on a busy machine, and a metadata server."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from hypothesis import HealthCheck, settings

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.server import metadata_app

# No test asserts a time, so neither does hypothesis; fixtures shared by its examples are meant
# to be; a failure prints how to have it again.
settings.register_profile(
    "halfmoon",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.load_profile("halfmoon")


@pytest.fixture
def metadata_url() -> Iterator[str]:
    """An empty metadata store behind a server, in a thread, for what runs in processes."""
    # Saying TCP lets asyncio turn Nagle's algorithm off, which costs 40 ms per answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(
        metadata_app(MemoryStore()), interface="asgi3", log_config=None, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the metadata server did not start"
        time.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = server.force_exit = True
    thread.join()
    listener.close()
