"""Compare our engine with vLLM's on the same cores: `python -m benchmarks.engine`."""
