"""One program per peer, each run in an environment of its own.

A program takes "ops sizes seconds" (comma-separated), and prints one JSON line per
measurement. They import nothing of ours but `measure.py`, which lies beside them.
"""
