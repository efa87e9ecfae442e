"""Paged attention under transformers' own models, and a deterministic fake."""
