"""Run kvstore nodes as processes, and their metadata server, while a block runs."""

import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata import MemoryStore, MetadataStore
from halfmoon_metadata.http_server import metadata_app
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import MEMBERS


@contextmanager
def metadata_server() -> Iterator[str]:
    """Its URL."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        metadata_app(MemoryStore()), interface="asgi3", log_config=None, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = server.force_exit = True
    thread.join()
    listener.close()


@contextmanager
def kvstore_nodes(
    folder: Path, metadata: str, nodes: Mapping[str, Mapping[str, object]]
) -> Iterator[list[ServiceProcess]]:
    """Nodes that are ready.

    Args:
        folder: for their logs.
        metadata: URL of the metadata server.
        nodes: by name, their flags without the dashes.

    Raises:
        RuntimeError: one of them ended, with its last words.
    """
    processes: list[ServiceProcess] = []
    try:
        for name, given in nodes.items():
            words = {"worker-id": name, "metadata": metadata, **given}
            flags = tuple(word for key, value in words.items() for word in (f"--{key}", str(value)))
            processes.append(ServiceProcess(ProcessSpec(name, "kvstore", flags), folder))
        while any(process.stage != "ready" for process in processes):
            for process in processes:
                if process.exit_code is not None:
                    raise RuntimeError("\n".join(process.last_lines()))
            time.sleep(0.05)
        yield processes
    finally:
        for process in processes:
            process.signal(signal.SIGKILL)
            process.wait(10)


def record_of(metadata: MetadataStore, name: str) -> WorkerInfo:
    """What a node that is ready says of itself."""
    record = metadata.get(MEMBERS + name)
    assert record is not None, f"{name} is ready and has no record"
    return msgspec.json.decode(record, type=WorkerInfo)
