"""Blocks put into and got from a store: ours beside others, see `__main__`."""
