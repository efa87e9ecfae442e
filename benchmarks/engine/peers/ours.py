"""Our engine, driven directly over a pool of its own."""

import json
import mmap
import sys

from serve_operations import Clock, forget_peak, resident_bytes, serve, take_stdout

from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling

answers = take_stdout()
given = json.loads(sys.argv[1])
clock = Clock(given["clock"], given["threads"])
GREEDY = Draw(Sampling(temperature=0.0))
engine = open_engine(
    given["model"],
    block_size=given["block_size"],
    dtype=given["dtype"],
    device="cpu",
    threads=given["threads"],
)
layout = engine.layout
n_pages = sum(layout.blocks_for(n) for n in given["sequences"])
pool = None


def hold_pool():
    """Have the pool in memory, with numbers in it."""
    global pool
    if pool is None:
        import torch

        pool = mmap.mmap(-1, n_pages * layout.block_bytes, flags=mmap.MAP_PRIVATE)
        values = torch.frombuffer(pool, dtype=getattr(torch, given["dtype"]))
        values.view(n_pages, -1)[:] = torch.randn(layout.block_bytes // values.itemsize) / 8
        engine.attach(memoryview(pool))
        del values


def drop_pool():
    global pool
    if pool is not None:
        engine.detach()
        pool = None


def prefill(n, release=False):
    hold_pool()
    forget_peak()
    tokens, pages = [5 + 7 * i % 300 for i in range(n)], range(layout.blocks_for(n))

    def once():
        for start in range(0, n, given["chunk"]):
            end = min(n, start + given["chunk"])
            draw = GREEDY if end == n else None
            engine.forward([Run(tokens[start:end], start, pages, draw, start > 0)])

    seconds = clock.repeated(once)
    peak = resident_bytes("VmHWM") - len(pool)
    if release:
        drop_pool()
    return {"seconds": seconds, "peak_bytes": peak}


def decode(batch, context, steps, release=False):
    hold_pool()
    each = layout.blocks_for(context + steps)
    pages = [range(i * each, (i + 1) * each) for i in range(batch)]
    tokens = [5 + i for i in range(batch)]
    seconds = []
    for step in range(steps):

        def once(step=step):
            nonlocal tokens
            tokens = engine.forward(
                [
                    Run([token], context - 1 + step, own, GREEDY, continues=step > 0)
                    for token, own in zip(tokens, pages, strict=True)
                ]
            )

        seconds.append(clock.seconds(once))
    if release:
        drop_pool()
    return {"seconds": seconds[2:]}


prefill(512)
decode(2, 64, 4)
decode(1, 64, 4)
drop_pool()
mode = f"{engine.description}, chunks of {given['chunk']}, pages of {given['block_size']}"
serve(
    answers,
    {"mode": mode, "resident_bytes": resident_bytes()},
    {"prefill": prefill, "decode": decode},
)
