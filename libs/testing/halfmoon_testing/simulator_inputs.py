"""Make cost files and traces for tests, of small round numbers, with any field overridden."""

from typing import Any

import msgspec

from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.workloads.traces import TraceRequest

#: A prompt takes 1 s and 10 ms a token, a decode step 1 s, a message half a second.
#: Blocks of 16 tokens have 1,024 bytes; networks are so fast that transfers take no time.
TINY = CostFile(
    name="tiny",
    source=("made up for tests",),
    prefill=PrefillCost(c0_s=1.0, c1_s=0.01, c2_s=0.0),
    pass_s=1.0,
    decode=DecodeCost(d0_s=1.0, d1_s=0.0, d2_s=0.0),
    n_layers=2,
    n_kv_heads=1,
    head_dim=4,
    dtype="float32",
    max_context=4096,
    device_kv_bytes=64 * 1024,
    host_kv_bytes=64 * 1024,
    network_bytes_per_s=1e15,
    local_bytes_per_s=1e15,
    message_s=0.5,
)


def tiny_costs(**changes: Any) -> CostFile:
    """Return `TINY` with these fields changed."""
    return msgspec.structs.replace(TINY, **changes)


def a_trace_request(
    at_s: float = 0.0,
    n_input: int = 100,
    n_output: int = 3,
    *,
    prompt: int = 0,
    shared: int = 0,
    session: str | None = None,
    priority: int = 0,
    ttft_slo_s: float | None = None,
) -> TraceRequest:
    """Return a request in blocks of 16 tokens; all requests share its first `shared` blocks."""
    n_blocks = -(-n_input // 16)
    own = 1_000 * (prompt + 1)
    blocks = (*range(min(shared, n_blocks)), *range(own + shared, own + n_blocks))
    return TraceRequest(at_s, n_input, n_output, blocks, session, priority, ttft_slo_s)
