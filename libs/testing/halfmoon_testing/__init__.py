"""Provide peers, inputs, models and soaks for tests and benchmarks; never shipped."""
