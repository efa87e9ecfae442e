"""One program per engine, each run in an environment of its own, and one for the ceilings.

A program takes its settings as one JSON argument. It reads one JSON line per measurement and
prints one JSON line back (`serve_operations.py`). They import nothing of ours but what lies
beside them; only `ours.py` imports our engine.
"""
