"""Decide without sockets, clocks or threads: the next batch, the next rail, the nearest NIC."""
