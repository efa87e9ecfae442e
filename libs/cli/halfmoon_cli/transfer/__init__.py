"""Measure bandwidth, show the topology, copy folders: `halfmoon transfer` and `halfmoon p2p`."""
