"""Decide what a prefill worker does next: its queue, and which replicas of a block it reads."""
