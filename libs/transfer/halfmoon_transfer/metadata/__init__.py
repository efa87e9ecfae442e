"""Publish and look up segment records in the metadata store: value, cache and lease."""
