"""Compare our transfer library with its peers: `python -m benchmarks.transfer`."""
