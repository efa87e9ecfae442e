"""Keep a segment's record in the metadata store: its value, cache and lease."""
