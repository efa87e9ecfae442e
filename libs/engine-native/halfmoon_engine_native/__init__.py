"""Compute paged attention and linears in C++, with the widest instructions of the processor."""
