"""Compute prompts: queue, cached prefix, forward passes, streams of KV, answers."""
