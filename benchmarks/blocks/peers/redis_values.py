"""Redis: SET, GET and EXISTS, pipelined over TCP; the server is started here."""

import os
import subprocess
import tempfile
import time

import redis
from clock import ROOM, batch_of, measure

PORT = 27_000 + os.getpid() % 1000
memory = memoryview(bytearray(os.urandom(4096) * (ROOM // 4096)))
with tempfile.TemporaryDirectory() as folder:
    server = subprocess.Popen(
        ["redis-server", "--port", str(PORT), "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=PORT)
    for _ in range(200):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)

    def run(op: str, size: int, n_blocks: int) -> float:
        n_room = batch_of(size)
        if op == "put":
            client.flushall()
        started = time.perf_counter()
        pipe = client.pipeline(transaction=False)
        for index in range(n_blocks):
            if op == "put":
                pipe.set(f"{size}/{index}", memory[index * size : (index + 1) * size])
            elif op == "get":
                pipe.get(f"{size}/{index}")
            else:
                pipe.exists(f"{size}/{index}")
        answers = pipe.execute()
        if op == "get":
            for index, answer in enumerate(answers):
                memory[index * size : (index + 1) * size] = answer
        seconds = time.perf_counter() - started
        if op == "put" and n_blocks < n_room:  # what is asked for next must be there
            for index in range(n_blocks, n_room):
                client.set(f"{size}/{index}", memory[index * size : (index + 1) * size])
        return seconds

    try:
        measure(run)
    finally:
        server.terminate()
        server.wait()
