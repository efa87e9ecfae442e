"""Compute paged attention, linears and whole decoders, and draw tokens, in C++.

The kernels take the widest instructions that the processor has. Optional: `make native` builds
them, and halfmoon-engine computes with torch where they are missing.
"""

from halfmoon_engine_native._native import (
    FORWARD_PARTS,
    Batch,
    Decoder,
    Linear,
    Pool,
    attend,
    choose_tokens,
    instruction_set,
    instruction_sets,
    join_pages,
    linear_unpacked,
    score_tokens,
    set_threads,
    threads,
    use_instruction_set,
    write_kv,
)

__all__ = [
    "FORWARD_PARTS",
    "Batch",
    "Decoder",
    "Linear",
    "Pool",
    "attend",
    "choose_tokens",
    "instruction_set",
    "instruction_sets",
    "join_pages",
    "linear_unpacked",
    "score_tokens",
    "set_threads",
    "threads",
    "use_instruction_set",
    "write_kv",
]
