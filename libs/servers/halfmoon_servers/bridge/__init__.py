"""Bridge plain inference servers to conductors: each server appears as Halfmoon workers."""
