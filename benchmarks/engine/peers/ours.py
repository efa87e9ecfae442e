"""Our engine, with torch or with vLLM inside, driven directly over a pool of its own."""

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
    engine=given["engine"],
    engine_options=given["engine_options"],
)
layout = engine.layout
#: Seconds that have gone into copies between the pool and a mirror in another layout.
converted_s = 0.0


def time_conversion():
    """Count the time of vLLM's engine between its cache and the pool."""
    from halfmoon_vllm.head_rows import HeadRows

    def timed(copy):
        def call(*arguments):
            global converted_s
            began_s = clock.now()
            result = copy(*arguments)
            converted_s += clock.now() - began_s
            return result

        return call

    HeadRows.read, HeadRows.write = timed(HeadRows.read), timed(HeadRows.write)


if given["engine"] == "vllm":
    time_conversion()
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

    before_s = converted_s
    seconds = clock.repeated(once)
    converting_s = (converted_s - before_s) / len(seconds)
    peak = resident_bytes("VmHWM") - len(pool)
    if release:
        drop_pool()
    return {"seconds": seconds, "peak_bytes": peak, "converting_s": converting_s}


def decode(batch, context, steps, release=False):
    hold_pool()
    each = layout.blocks_for(context + steps)
    pages = [range(i * each, (i + 1) * each) for i in range(batch)]
    tokens = [5 + i for i in range(batch)]
    seconds = []
    for step in range(steps):
        if step == 2:
            before_s = converted_s

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
    return {"seconds": seconds[2:], "converting_s": (converted_s - before_s) / (steps - 2)}


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
