"""Redis: SET and GET of values, pipelined; the server is started here."""

import os
import subprocess
import tempfile
import time

import redis
from measure import ROOM, measure

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

    def move(op: str, size: int, n_blocks: int) -> None:
        pipe = client.pipeline(transaction=False)
        for index in range(n_blocks):
            if op == "write":
                pipe.set(f"{size}/{index}", memory[index * size : (index + 1) * size])
            else:
                pipe.get(f"{size}/{index}")
        answers = pipe.execute()
        if op == "read":
            for index, answer in enumerate(answers):
                memory[index * size : index * size + len(answer)] = answer

    measure(move, [server.pid])
    server.terminate()
    server.wait()
