"""Simulate the baseline: prefill and decode on one instance."""
