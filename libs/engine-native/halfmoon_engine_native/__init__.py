"""Compute paged attention, linears and whole decoders in C++.

The kernels take the widest instructions that the processor has. Optional: `make native` builds
them, and halfmoon-engine computes with torch where they are missing.
"""

from halfmoon_engine_native._native import (
    Batch,
    Decoder,
    Linear,
    Pool,
    attend,
    instruction_set,
    instruction_sets,
    linear_unpacked,
    set_threads,
    threads,
    use_instruction_set,
    write_kv,
)

__all__ = [
    "Batch",
    "Decoder",
    "Linear",
    "Pool",
    "attend",
    "instruction_set",
    "instruction_sets",
    "linear_unpacked",
    "set_threads",
    "threads",
    "use_instruction_set",
    "write_kv",
]
