"""Halfmoon's KV block store."""
