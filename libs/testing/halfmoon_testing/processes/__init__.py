"""Run peers of tests and benchmarks as processes of their own."""
