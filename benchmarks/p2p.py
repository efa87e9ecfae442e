"""Measure one publisher and four getters on one machine: time, and bytes uploaded by each.

Run with `python -m benchmarks.p2p [MiB] [backends]`; 1024 MiB over TCP if not said. Beside it
the same object read by one process from the publisher alone.
"""

import socket
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack

import uvicorn

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.http_server import metadata_app
from halfmoon_testing.processes.p2p_process import P2PProcess

MIB = 1024 * 1024
N_GETTERS = 4


def serve_metadata(stack: ExitStack) -> str:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    stack.callback(listener.close)
    app = metadata_app(MemoryStore())
    server = uvicorn.Server(uvicorn.Config(app, interface="asgi3", log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = server.force_exit = True
        thread.join()

    stack.callback(stop)
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


def run(n_bytes: int, backends: str) -> None:
    with ExitStack() as stack:
        url = serve_metadata(stack)

        def start(name: str) -> P2PProcess:
            return stack.enter_context(P2PProcess(name, url, backends))

        publisher, alone = start("publisher"), start("alone")
        getters = [start(f"getter-{index}") for index in range(N_GETTERS)]
        started = time.perf_counter()
        publisher.ask(f"publish single {n_bytes}")
        print(f"publish: {time.perf_counter() - started:.2f} s, with filling and checksums")
        alone.send("get single")
        single = alone.got()
        print(f"one getter: {single.report.seconds:.2f} s")
        alone.kill()
        publisher.ask(f"publish object {n_bytes}")
        for getter in getters:
            getter.ask("list")
        for getter in getters:
            getter.send("get object")
        answers = [getter.got() for getter in getters]
        assert all(each.right for each in [single, *answers])
        uploaded: Counter[str] = Counter()
        for each in answers:
            uploaded.update(each.report.bytes_from)
        slowest = max(each.report.seconds for each in answers)
        print(
            f"{N_GETTERS} getters: {slowest:.2f} s, {N_GETTERS * n_bytes / slowest / 1e9:.2f} GB/s"
        )
        for name, count in sorted(uploaded.items()):
            print(f"  {name:10} uploaded {count / n_bytes:.2f} objects")


if __name__ == "__main__":
    run(int((sys.argv[1:2] or ["1024"])[0]) * MIB, (sys.argv[2:3] or ["tcp"])[0])
