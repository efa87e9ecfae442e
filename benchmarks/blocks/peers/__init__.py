"""One program per peer, each run in an environment of its own.

A program takes "sizes seconds" as its last arguments (sizes comma-separated), and prints one JSON
line per measurement. They import nothing of ours but `clock.py`, which lies beside them.
"""
