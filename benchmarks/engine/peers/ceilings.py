"""What the cores can do at most: a large matrix product, and reading memory."""

import json
import sys

from serve_operations import Clock, serve, take_stdout

answers = take_stdout()
given = json.loads(sys.argv[1])
clock = Clock(given["clock"], given["threads"])

import torch  # noqa: E402

torch.set_num_threads(given["threads"])
dtype = getattr(torch, given["dtype"])
#: Sides of the square matrices, and bytes that are read: much more than any cache holds.
SIDES = (1024, 2048)
READ_BYTES = 512 << 20


def products(side):
    """Return ways to multiply two square matrices; which is fastest depends on the processor."""
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    out = a @ b
    packed = torch.ops.mkldnn._reorder_linear_weight(b, side)
    return (
        lambda: torch.mm(a, b, out=out),
        lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""),
    )


def measure():
    """Return operations per second of the fastest product, and bytes per second read."""
    flops = 0.0
    for side in SIDES:
        for product in products(side):
            try:
                product()
            except RuntimeError:  # oneDNN has no such product for this processor
                continue
            flops = max(flops, 2 * side**3 / min(clock.repeated(product)))
    # A sum takes next to no arithmetic: its speed is that of reading.
    memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    read_s = min(clock.repeated(memory.sum))
    return {"flops_per_s": flops, "bytes_per_s": READ_BYTES / read_s}


serve(answers, {"mode": f"torch {torch.__version__}"}, {"ceilings": measure})
