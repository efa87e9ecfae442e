"""Halfmoon's decode worker."""
