"""Make the requests of a run: read traces, generate workloads."""
