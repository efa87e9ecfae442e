"""Our transfer library and its peers, side by side: `python -m benchmarks.transfer`."""
