"""Bytes between registered regions of memory, one-sided, checksummed and acknowledged."""
