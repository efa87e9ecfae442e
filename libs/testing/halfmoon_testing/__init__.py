"""Help tests and benchmarks with peers in processes and soaks; no shipped package imports it."""
