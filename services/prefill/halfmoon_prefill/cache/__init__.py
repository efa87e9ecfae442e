"""Fetch cached prefixes from kvstores and keep new blocks there for reuse."""
