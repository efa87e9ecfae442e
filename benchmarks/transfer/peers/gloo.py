"""torch.distributed with gloo: `send` and `recv` of tensors between two processes."""

import os
import sys

import torch
import torch.distributed as dist
from measure import ROOM, measure

torch.set_num_threads(1)
PORT = 29_000 + os.getpid() % 1000


def join(rank: int) -> torch.Tensor:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=2)
    return torch.ones(ROOM, dtype=torch.uint8)


pid = os.fork()
if pid == 0:
    memory = join(1)
    order = torch.zeros(3, dtype=torch.int64)
    while True:
        dist.recv(order, 0)
        op, size, n_blocks = order.tolist()
        if op == 2:
            os._exit(0)
        for index in range(n_blocks):
            block = memory[index * size : (index + 1) * size]
            if op == 1:
                dist.recv(block, 0)
            else:
                dist.send(block, 0)
        if op == 1:
            dist.send(order, 0)

memory = join(0)
order = torch.zeros(3, dtype=torch.int64)


def move(op: str, size: int, n_blocks: int) -> None:
    dist.send(torch.tensor([op == "write", size, n_blocks], dtype=torch.int64), 1)
    for index in range(n_blocks):
        block = memory[index * size : (index + 1) * size]
        if op == "write":
            dist.send(block, 1)
        else:
            dist.recv(block, 1)
    if op == "write":
        dist.recv(order, 1)


measure(move, [pid])
dist.send(torch.tensor([2, 0, 0], dtype=torch.int64), 1)
sys.stdout.flush()
os._exit(0)
