"""Compare servers by the load that they serve within limits: `python -m benchmarks.goodput`."""
