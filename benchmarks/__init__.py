"""Measure how fast Halfmoon is on this machine: ratios in one run, medians of several.

    python -m benchmarks            everything, a few minutes
    python -m benchmarks ttft       what a cached prefix saves
    python -m benchmarks overhead   what the control plane adds to a request
    python -m benchmarks reservation  what reserving decode pages first costs

Nothing here is asserted in tests. docs/performance.md holds the tables.
"""
