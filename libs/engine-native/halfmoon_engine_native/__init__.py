"""Compute paged attention, linears and whole decoders in C++.

The kernels take the widest instructions that the processor has. Optional: `make native` builds
them, and halfmoon-engine computes with torch where they are missing.
"""

from halfmoon_engine_native import _native as native

__all__ = ["native"]
