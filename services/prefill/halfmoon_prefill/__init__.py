"""Halfmoon's prefill worker."""
