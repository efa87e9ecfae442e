"""Compute models with vLLM behind the contract of `halfmoon_engine.interface`."""
